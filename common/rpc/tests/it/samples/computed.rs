//! The methods of a filegen-server, and of a sub for computed files.

use api::file_generator::{
    ComputedContent, GenerateReply, GenerateRequest, GeneratedContent, GeneratedFile, Generator,
    Generators, GetContentsReply, GetContentsRequest, GetGeneratorsReply, GetGeneratorsRequest,
    GetSecretsRequest, RenewCertificatesReply, RenewCertificatesRequest, WantedFiles,
};
use api::subd::AddObjectsRequest;
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::Algorithm;

use super::{blake3, path, sha512};

fn content() -> ComputedContent {
    ComputedContent { id: blake3(0x77), bytes: ByteText(b"nameserver \xff\n".to_vec()) }
}

pub fn generate() -> (GenerateRequest, GenerateReply) {
    let machine = Machine {
        hostname: "web1".into(),
        location: "nyc/rack4".into(),
        tags: [("role".to_owned(), "web".to_owned())].into(),
        ..Machine::default()
    };
    let paths = vec![path("/etc/resolv.conf"), path("/etc/motd")];
    let wanted = WantedFiles { machine, algorithm: Algorithm::Sha512, paths };
    let made = GeneratedContent {
        id: sha512(0x44),
        size_bytes: 513,
        valid_until_seconds: 1_800_000_000,
        generator: blake3(0x55),
        is_secret: true,
    };
    let files =
        vec![GeneratedFile::Made(made), GeneratedFile::Failed("no generator for /etc/motd".into())];
    (GenerateRequest { machines: vec![wanted] }, GenerateReply { machines: vec![files] })
}

pub fn get_contents() -> (GetContentsRequest, GetContentsReply) {
    let request = GetContentsRequest { ids: vec![blake3(0x77), sha512(0x88)] };
    (request, GetContentsReply { contents: vec![content()], absent: vec![sha512(0x88)] })
}

pub fn get_secrets() -> (GetSecretsRequest, GetContentsReply) {
    let (GetContentsRequest { ids }, reply) = get_contents();
    (GetSecretsRequest { ids, hostnames: vec!["web1".into(), "web2".into()] }, reply)
}

pub fn get_generators() -> (GetGeneratorsRequest, GetGeneratorsReply) {
    let generator = Generator {
        path: path("/etc/resolv.conf"),
        kind: "template".into(),
        version: blake3(0x66),
        is_secret: true,
    };
    let (generators, error) = (vec![generator], "line 3: no such".to_owned());
    let generators = Generators { generators, error, renewals: 2 };
    let request = GetGeneratorsRequest { have: Some(blake3(0x11)), wait_ms: 60_000 };
    (request, GetGeneratorsReply { version: blake3(0x22), generators: Some(generators) })
}

pub fn add_to_cache() -> AddObjectsRequest {
    AddObjectsRequest { contents: vec![content()] }
}

pub fn renew_certificates() -> (RenewCertificatesRequest, RenewCertificatesReply) {
    let hostnames = Some(vec!["web1".to_owned()]);
    let request = RenewCertificatesRequest { hostnames, why: "the key was seen".to_owned() };
    (request, RenewCertificatesReply { hostnames: vec!["web1".to_owned()] })
}
