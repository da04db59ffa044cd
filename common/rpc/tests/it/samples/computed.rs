//! The methods of a filegen-server, and of a sub for computed files.

use api::Done;
use api::dominator::content::{
    ContentCause, ContentChange, ContentChangeId, ContentOrder, ContentStage,
    ListContentChangesReply, ListContentChangesRequest, OrderContentChangeRequest,
};
use api::file_generator::{
    ComputedContent, FileContent, GenerateReply, GenerateRequest, GeneratedContent, GeneratedFile,
    Generator, Generators, GetContentsReply, GetContentsRequest, GetGeneratorsReply,
    GetGeneratorsRequest, GetSecretsRequest, LoadReply, LoadRequest, OrderRevisionReply,
    OrderRevisionRequest, RenewCertificatesReply, RenewCertificatesRequest, RevisionOrder,
    SignContentsReply, SignContentsRequest, WantedFiles,
};
use api::subd::{
    AddObjectsRequest, ForgetIssuedReply, ForgetIssuedRequest, OfferContentsRequest,
    ReplaceCertificateRequest,
};
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::Algorithm;
use model::tree::Time;

use super::image_life::signature;
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
    let key = Some(ByteText(vec![0x30, 0x59, 0xff]));
    let outputs = r#"{"db":{"port":5432}}"#.to_owned();
    let wanted = WantedFiles { machine, algorithm: Algorithm::Sha512, paths, key, outputs };
    let made = GeneratedContent {
        id: sha512(0x44),
        size_bytes: 513,
        valid_until_seconds: 1_800_000_000,
        generator: blake3(0x55),
        is_secret: true,
    };
    let files =
        vec![GeneratedFile::Made(made), GeneratedFile::Failed("no generator for /etc/motd".into())];
    (
        GenerateRequest { machines: vec![wanted], is_for_use: true },
        GenerateReply { machines: vec![files] },
    )
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
        revision: 6,
        resources: vec!["db".to_owned()],
    };
    let (generators, error) = (vec![generator], "line 3: no such".to_owned());
    let stopped = Some("3 machines failed".to_owned());
    let orders = vec![RevisionOrder { revision: 6, number: 4, stopped }];
    let signer = Some("ssh-ed25519 AAAA".to_owned());
    let generators =
        Generators { generators, error, renewals: 2, numbering: 9, revision: 7, orders, signer };
    let request = GetGeneratorsRequest { have: Some(blake3(0x11)), wait_ms: 60_000 };
    (request, GetGeneratorsReply { version: blake3(0x22), generators: Some(generators) })
}

pub fn add_to_cache() -> AddObjectsRequest {
    AddObjectsRequest { contents: vec![content()] }
}

pub fn replace_certificate() -> ReplaceCertificateRequest {
    ReplaceCertificateRequest { chain: ByteText(b"-----BEGIN CERTIFICATE-----\n".to_vec()) }
}

pub fn renew_certificates() -> (RenewCertificatesRequest, RenewCertificatesReply) {
    let hostnames = Some(vec!["web1".to_owned()]);
    let request = RenewCertificatesRequest { hostnames, why: "the key was seen".to_owned() };
    (request, RenewCertificatesReply { hostnames: vec!["web1".to_owned()] })
}

pub fn order_revision() -> (OrderRevisionRequest, OrderRevisionReply) {
    let stopped = Some("3 machines failed".to_owned());
    let why = "3 machines failed".to_owned();
    (OrderRevisionRequest { revision: 6, stopped, why }, OrderRevisionReply { number: 4 })
}

pub fn sign_contents() -> (SignContentsRequest, SignContentsReply) {
    let files = vec![FileContent { path: path("/etc/resolv.conf"), id: blake3(0x44) }];
    let request = SignContentsRequest { hostname: "web1".to_owned(), files };
    (request, SignContentsReply { signatures: vec![signature()] })
}

pub fn offer_contents() -> OfferContentsRequest {
    OfferContentsRequest { signatures: vec![signature()] }
}

pub fn forget_issued() -> (ForgetIssuedRequest, ForgetIssuedReply) {
    let (path, why) = (path("/etc/resolv.conf"), "the clock was wrong".to_owned());
    (ForgetIssuedRequest { path, why }, ForgetIssuedReply { issued: Some(1_800_000_000) })
}

pub fn list_content_changes() -> (ListContentChangesRequest, ListContentChangesReply) {
    let id = |cause| ContentChangeId { source: "files:6972".to_owned(), cause };
    let change = |id, stage, paths| ContentChange {
        id,
        stage,
        since: Time { seconds: 1_800_000_000, nanoseconds: 5 },
        paths,
        waiting: 9_990,
        trying: vec!["web1".into(), "web2".into()],
        verified: 1,
        failed: 2,
        reversible: 3,
    };
    let stopped = ContentStage::Stopped("3 machines failed".to_owned());
    let paths = vec![path("/etc/motd")];
    let changes = vec![
        change(id(ContentCause::Revision(7)), stopped, paths.clone()),
        change(id(ContentCause::Path(path("/etc/motd"))), ContentStage::First, paths),
        change(id(ContentCause::Revision(8)), ContentStage::Open, Vec::new()),
    ];
    let request = ListContentChangesRequest { source: "files:6972".to_owned() };
    (request, ListContentChangesReply { changes })
}

pub fn order_content_change() -> (OrderContentChangeRequest, Done) {
    let id = "files:6972/7".parse().unwrap();
    let (why, who) = ("wrong servers".to_owned(), "alice".to_owned());
    (OrderContentChangeRequest { id, order: ContentOrder::RollBack, why, who }, Done {})
}

pub fn load_configuration() -> (LoadRequest, LoadReply) {
    let error = "line 3: no such".to_owned();
    (LoadRequest { why: "at once".to_owned() }, LoadReply { revision: 7, error })
}
