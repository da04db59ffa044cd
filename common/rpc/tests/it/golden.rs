//! The bytes of everything that travels or is digested, pinned.
//!
//! A change of these files is a change of the protocol or of the image format: peers and images
//! of earlier releases must be thought of. `UPDATE_EXPECT=1 cargo test -p rpc` writes them.

use std::fmt::{Debug, Write as _};

use api::audit::call_details::CallDetails;
use api::codec::{Encoding, decode, encode};
use api::object_stream::{ContentForm, ObjectHead};
use api::{
    fault::{Fault, FaultCode},
    method::{Effect, Method},
};
use expect_test::{ExpectFile, expect_file};
use model::object::Algorithm;
use model::tree::{Child, Directory, text};
use rpc::packing;
use rpc::server::head_bytes;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::methods::{self, Visitor};
use crate::samples;

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(40) {
        text.push_str("  ");
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

/// Both encodings of `value`, each seen to decode to the same value again.
fn both<T: Serialize + DeserializeOwned>(text: &mut String, what: &'static str, value: &T) {
    let bincode = encode(Encoding::Bincode, what, value).unwrap();
    let json = encode(Encoding::Json, what, value).unwrap();
    let limit = 1 << 20;
    let again: T = decode(Encoding::Bincode, what, &bincode, limit).unwrap();
    assert_eq!(encode(Encoding::Json, what, &again).unwrap(), json);
    let again: T = decode(Encoding::Json, what, &json, limit).unwrap();
    assert_eq!(encode(Encoding::Bincode, what, &again).unwrap(), bincode);
    // Whatever is cut off, what is left is refused.
    for length in 0..bincode.len() {
        assert!(decode::<T>(Encoding::Bincode, what, &bincode[..length], limit).is_err());
    }
    write!(text, "{what}, bincode:\n{}", hex(&bincode)).unwrap();
    writeln!(text, "{what}, JSON:\n  {}", String::from_utf8(json).unwrap()).unwrap();
}

/// The names of the methods that were pinned, and their text.
#[derive(Default)]
struct Pinned {
    names: Vec<&'static str>,
    text: String,
}

impl Visitor for Pinned {
    fn method<M>(&mut self, (request, reply): (M::Request, M::Reply))
    where
        M: Method<Request: JsonSchema, Reply: JsonSchema>,
    {
        self.names.push(M::NAME);
        writeln!(self.text, "== {}", M::NAME).unwrap();
        both(&mut self.text, "request", &request);
        both(&mut self.text, "reply", &reply);
        if M::EFFECT != Effect::Tells {
            let CallDetails { arguments, why, who } = M::audit_details(&request);
            writeln!(self.text, "audit:\n  {arguments} | {why} | {who}").unwrap();
        }
        self.text.push('\n');
    }
}

impl Pinned {
    fn check(self, service: &str, file: ExpectFile) {
        let mut names = self.names;
        names.sort_unstable();
        let served: Vec<&str> = api::methods()
            .into_iter()
            .filter(|method| !method.reserved && method.name.starts_with(service))
            .map(|method| method.name)
            .collect();
        assert_eq!(names, served);
        file.assert_eq(&self.text);
    }
}

#[test]
fn methods_have_these_bytes() {
    let pinned = |visit: fn(&mut Pinned)| {
        let mut pinned = Pinned::default();
        visit(&mut pinned);
        pinned
    };
    pinned(methods::subd).check("Subd.", expect_file!["golden/subd.txt"]);
    let file = expect_file!["golden/image_server.txt"];
    pinned(methods::image_server).check("ImageServer.", file);
    let file = expect_file!["golden/object_server.txt"];
    pinned(methods::object_server).check("ObjectServer.", file);
    pinned(methods::dominator).check("Dominator.", expect_file!["golden/dominator.txt"]);
    pinned(methods::mdb).check("MdbServer.", expect_file!["golden/mdb.txt"]);
    let file = expect_file!["golden/file_generator.txt"];
    pinned(methods::file_generator).check("FileGenerator.", file);
}

#[test]
fn an_image_with_signers_has_these_bytes() {
    let mut text = String::new();
    both(&mut text, "content", &samples::signed_content());
    writeln!(text, "digest: {}", samples::signed_content().digest()).unwrap();
    expect_file!["golden/image_2.txt"].assert_eq(&text);
}

#[test]
fn every_service_is_pinned() {
    let services =
        ["Subd.", "ImageServer.", "ObjectServer.", "Dominator.", "MdbServer.", "FileGenerator."];
    for method in api::methods() {
        let pinned = services.iter().any(|service| method.name.starts_with(service));
        assert!(method.reserved || pinned, "{}", method.name);
    }
}

#[test]
fn faults_have_these_bytes() {
    let mut text = String::new();
    for code in FaultCode::ALL {
        let fault = Fault::new(code, "why");
        let json = serde_json::to_value(code).unwrap();
        assert_eq!(json.as_str(), Some(code.name()));
        writeln!(text, "== {} {}", code.status(), code.name()).unwrap();
        both(&mut text, "fault", &fault);
    }
    expect_file!["golden/faults.txt"].assert_eq(&text);
}

#[test]
fn object_streams_have_these_bytes() {
    let mut text = String::new();
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        let id = algorithm.digest(b"content");
        for head in [ObjectHead::Object { id, size_bytes: 7 }, ObjectHead::Absent(id)] {
            writeln!(text, "== {algorithm} {}", kind(&head)).unwrap();
            text.push_str(&hex(&head_bytes(&head)));
        }
        let mut packed = Vec::new();
        ObjectHead::Object { id, size_bytes: 7 }.encode_as(ContentForm::Packed, &mut packed);
        packing::append(&mut packed, b"content", None);
        writeln!(text, "== {algorithm} packed object, a chunk as it is").unwrap();
        text.push_str(&hex(&packed));
    }
    writeln!(text, "== end\n{}", hex(&head_bytes(&ObjectHead::End)).trim_end()).unwrap();
    expect_file!["golden/object_stream.txt"].assert_eq(&text);
}

fn kind(head: &impl Debug) -> String {
    let text = format!("{head:?}");
    text.split([' ', '(']).next().unwrap().to_lowercase()
}

#[test]
fn trees_have_these_bytes() {
    let mut out = String::new();
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        let tree = samples::tree(algorithm);
        writeln!(out, "== {algorithm}").unwrap();
        out.push_str(&text::to_text(&tree));
        dump(&mut out, "/", tree.root());
        out.push('\n');
    }
    expect_file!["golden/trees.txt"].assert_eq(&out);
}

fn dump(out: &mut String, path: &str, directory: &Directory) {
    writeln!(out, "{path} {}:\n{}", directory.digest(), hex(&directory.encode()).trim_end())
        .unwrap();
    for entry in directory.entries() {
        if let Child::Directory(below) = &entry.child {
            dump(out, &format!("{path}{}/", entry.name), below);
        }
    }
}
