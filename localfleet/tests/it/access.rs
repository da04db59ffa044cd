//! Every method of every daemon, called with certificates of every kind, over HTTP/1.1 and HTTP/2,
//! in bincode and in JSON.

mod kinds;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use api::codec::{self, Encoding};
use api::dominator::kept_files::CountKeptFiles;
use api::dominator::resources::GetResources;
use api::file_generator::GetGenerators;
use api::image_server::replication::{Forward, ForwardRequest};
use api::object_server::GetObjects;
use api::{
    access::{Access, IdentityKind},
    method::{Method as _, MethodInfo},
};
use certs::authority::{Authority, AuthorityOptions, Issued, Request};
use certs::record::{Reason, Revocation};
use certs::sets::Set;
use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, Full};
use hyper::Response;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use localfleet::fleet::certificates::Certificates;
use localfleet::fleet::daemon_process::Daemon;
use localfleet::fleet::{Addresses, Fleet, Options};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::converges::programs;

/// A call that is to be let in may wait for news: after this time it was let in.
const LET_IN_AFTER: Duration = Duration::from_secs(5);

/// The longest wait for a refusal, on a busy machine.
const REFUSED_WITHIN: Duration = Duration::from_secs(60);

/// Kinds of requests: HTTP/2 or not, JSON or not.
const FORMS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Where the revoked certificate is among the bad ones.
const REVOKED: usize = 2;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// There was no connection.
    Unconnected,
    /// The caller may not call it.
    Denied,
    /// It was answered in another way, or not soon.
    LetIn,
}

/// A request of each method, in bincode and in JSON, from the pinned ones.
fn requests() -> BTreeMap<String, [Vec<u8>; 2]> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../common/rpc/tests/it/golden");
    let mut requests = BTreeMap::new();
    for file in ["dominator", "file_generator", "image_server", "mdb", "object_server", "subd"] {
        let text = fs::read_to_string(place.join(file).with_extension("txt")).unwrap();
        for part in text.split("== ").skip(1) {
            let (name, rest) = part.split_once('\n').unwrap();
            let between = |from: &str, to: &str| {
                let (_, rest) = rest.split_once(from).unwrap();
                rest.split_once(to).unwrap().0.replace(['\n', ' '], "")
            };
            let bincode = between("request, bincode:\n", "request, JSON:\n");
            let digits = bincode.as_bytes().chunks(2);
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
            let bincode = digits.map(|pair| byte(pair).unwrap()).collect();
            let json = between("request, JSON:\n", "reply, bincode:\n").into_bytes();
            requests.insert(name.to_owned(), [bincode, json]);
        }
    }
    requests
}

/// Connects with `shown`, if that is a certificate, and trusts `ca_pem`.
pub fn connector(ca_pem: &str, shown: Option<&Issued>) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    for der in CertificateDer::pem_slice_iter(ca_pem.as_bytes()) {
        roots.add(der.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match shown {
        None => builder.with_no_client_auth(),
        Some(issued) => {
            let chain = CertificateDer::pem_slice_iter(issued.certificate_pem.as_bytes());
            let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain.map(Result::unwrap).collect(), key).unwrap()
        }
    };
    TlsConnector::from(Arc::new(config))
}

/// Returns the response, unless `connection` ends before. hyper's client alone can wait for ever:
/// a request that is queued while the connection ends is neither sent nor refused.
async fn first(
    response: impl Future<Output = hyper::Result<Response<Incoming>>>,
    connection: impl Future<Output = hyper::Result<()>> + Send + 'static,
) -> io::Result<Response<Incoming>> {
    let ended = tokio::spawn(connection);
    tokio::select! {
        biased;
        response = response => response.map_err(io::Error::other),
        _ = ended => Err(io::Error::other("the connection has ended")),
    }
}

/// A daemon, and the name that it proves to have.
#[derive(Clone)]
struct Target {
    address: SocketAddr,
    name: ServerName<'static>,
}

impl Target {
    fn of(address: SocketAddr) -> Self {
        Self { address, name: ServerName::from(address.ip()) }
    }

    /// Calls `method`; tells the status.
    async fn status(
        &self,
        by: &TlsConnector,
        (http2, json): (bool, bool),
        method: &str,
        requests: &[Vec<u8>; 2],
    ) -> io::Result<u16> {
        let stream = TcpStream::connect(self.address).await?;
        let stream = TokioIo::new(by.connect(self.name.clone(), stream).await?);
        let content_type = match (method, json) {
            ("ObjectServer.AddObjects", _) => "application/x-dominator-objects",
            (_, true) => "application/json",
            (_, false) => "application/octet-stream",
        };
        let request = hyper::Request::post(format!("https://{}/rpc/{method}", self.address))
            .header("host", self.address.to_string())
            .header("content-type", content_type)
            .header("dominator-protocol", 1)
            .body(Full::new(Bytes::from(requests[usize::from(json)].clone())))
            .unwrap();
        let response = if http2 {
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
                    .await
                    .map_err(io::Error::other)?;
            first(sender.send_request(request), connection).await
        } else {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(stream).await.map_err(io::Error::other)?;
            first(sender.send_request(request), connection).await
        };
        let response = response?;
        let status = response.status().as_u16();
        // An upload is answered in bincode.
        if status == 403 && json && method != "ObjectServer.AddObjects" {
            let body = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
            let text = String::from_utf8_lossy(&body).into_owned();
            assert!(text.contains("\"denied\""), "{method}: {text}");
        }
        Ok(status)
    }

    async fn outcome(
        &self,
        by: &TlsConnector,
        form: (bool, bool),
        method: &str,
        requests: &[Vec<u8>; 2],
        patience: Duration,
    ) -> Outcome {
        let status = self.status(by, form, method, requests);
        match tokio::time::timeout(patience, status).await {
            Ok(Err(_)) => Outcome::Unconnected,
            Ok(Ok(403)) => Outcome::Denied,
            Ok(Ok(_)) | Err(_) => Outcome::LetIn,
        }
    }

    /// Calls `method` by `by`, who is described by `who`, and checks what comes of it.
    async fn check(
        &self,
        (who, by): (&str, &TlsConnector),
        form: (bool, bool),
        method: &str,
        requests: &[Vec<u8>; 2],
        want: Outcome,
    ) {
        let patience = if want == Outcome::LetIn { LET_IN_AFTER } else { REFUSED_WITHIN };
        let got = self.outcome(by, form, method, requests, patience).await;
        assert_eq!(got, want, "{method} {form:?} {who}");
    }
}

/// The daemons of a fleet, an mdbd and a filegen-server.
struct Lab {
    fleet: Fleet,
    _others: [Daemon; 2],
    mdbd: SocketAddr,
    directory: tempfile::TempDir,
}

impl Lab {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fleet = Fleet::start(Options {
            programs: programs(directory.path()),
            directory: directory.path().to_owned(),
            subs: 1,
            subd_flags: Vec::new(),
            dominator_flags: Vec::new(),
            insecure: false,
            addresses: Addresses::private().unwrap(),
            stop: Arc::new(AtomicBool::new(false)),
        })
        .unwrap();
        let host = fleet.addresses().imageserver.ip();
        let port = std::net::TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
        let mdbd = SocketAddr::new(host, port);
        fleet.certificates().for_daemon("mdbd", Set::Mdbd, &[&host.to_string()]).unwrap();
        let path = |name: &str| directory.path().join(name);
        let config =
            format!("[[source]]\nname = 'fleet'\nfile = '{}'\n", path("mdb.json").display());
        fs::write(path("mdbd.toml"), config).unwrap();
        let mut words = fleet.certificates().flags("mdbd");
        let flags = [
            ("--config", path("mdbd.toml")),
            ("--mdb", path("made.json")),
            ("--state", path("mdbd")),
            ("--listen", mdbd.to_string().into()),
        ];
        for (flag, value) in flags {
            words.extend([flag.to_owned(), value.display().to_string()]);
        }
        let words = words.into_iter().map(Into::into).collect();
        let program = programs(&path("more")).join("mdbd");
        let mut daemon = Daemon::start("mdbd", &program, words, path("log/mdbd.log")).unwrap();
        fleet.wait_for(mdbd, &mut daemon, Duration::from_secs(60)).unwrap();
        let config = "[[generator]]\npath = '/etc/mdb.json'\nkind = 'mdb'\n";
        fs::write(path("filegen.toml"), config).unwrap();
        let filegen = fleet.start_filegen(&path("filegen.toml")).unwrap();
        Self { fleet, _others: [daemon, filegen], mdbd, directory }
    }

    /// Where `method` is answered.
    fn target(&self, method: &MethodInfo) -> Target {
        let addresses = self.fleet.addresses();
        Target::of(match method.name.split_once('.').unwrap().0 {
            "Dominator" => addresses.dominator,
            "FileGenerator" => addresses.filegen,
            "ImageServer" | "ObjectServer" => addresses.imageserver,
            "MdbServer" => self.mdbd,
            "Subd" => self.fleet.subs[0].address,
            other => panic!("nothing answers for {other}"),
        })
    }

    fn certificates(&self) -> &Certificates {
        self.fleet.certificates()
    }

    fn authority(&self) -> &Authority {
        self.certificates().authority().unwrap()
    }

    fn issue(&self, powers: &[&str]) -> Issued {
        self.authority().issue(&wanted(powers)).unwrap()
    }
}

fn wanted(powers: &[&str]) -> Request {
    Request {
        name: "somebody".to_owned(),
        powers: Some(powers.iter().map(|power| (*power).to_owned()).collect()),
        ..Request::default()
    }
}

#[test]
fn each_method_is_for_those_who_may_call_it_and_for_nobody_else() {
    let lab = Lab::new();
    let mut requests = requests();
    // What is sent on is judged by whom it comes from, too.
    let forward = requests.get_mut(Forward::NAME).unwrap();
    let mut sent: ForwardRequest =
        codec::decode(Encoding::Json, "request", &forward[1], 1 << 20).unwrap();
    sent.origin.has_power = true;
    *forward = [Encoding::Bincode, Encoding::Json]
        .map(|encoding| codec::encode(encoding, "request", &sent).unwrap());
    let methods: Vec<MethodInfo> =
        api::methods().into_iter().filter(|method| !method.reserved).collect();
    let ca_pem = lab.authority().ca_pem().to_owned();
    let foreign = Authority::create(&AuthorityOptions::default()).unwrap();
    let revoked = lab.issue(&["*.*"]);
    let ended = Request {
        start: Some(1_000_000_000),
        lifetime: Duration::from_secs(60),
        ..wanted(&["*.*"])
    };
    let ended = lab.authority().issue(&ended).unwrap();
    let list = lab.authority().revocation_list(
        &[Revocation {
            serial: revoked.certificate.serial.clone(),
            name: "somebody".to_owned(),
            reason: Reason::default(),
            revoked_at: 1_000_000_000,
            key: None,
        }],
        1,
    );
    let list = list.unwrap();
    for holder in ["dominator", "filegen-server", "imageserver", "mdbd", "sub-1"] {
        fs::write(lab.directory.path().join("tls").join(holder).join("crl.pem"), &list).unwrap();
    }
    // Where nobody gets in, over any form.
    let outside = [
        ("foreign", connector(&ca_pem, Some(&foreign.issue(&wanted(&["*.*"])).unwrap()))),
        ("ended", connector(&ca_pem, Some(&ended))),
        ("revoked", connector(&ca_pem, Some(&revoked))),
        ("trusting another authority", connector(foreign.ca_pem(), Some(&lab.issue(&["*.*"])))),
    ];
    let nobody = connector(&ca_pem, None);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut daemons = BTreeMap::new();
        for method in &methods {
            daemons.entry(lab.target(method).address).or_insert(*method);
        }
        // A daemon turns an address away that fails too often, so most methods are tried with one
        // kind of bad certificate each, and one method of each daemon with all.
        for method in daemons.values() {
            let (target, bodies) = (lab.target(method), &requests[method.name]);
            let (_, revoked) = &outside[REVOKED];
            testing::eventually_async("the certificate is revoked", async || {
                let outcome =
                    target.outcome(revoked, (true, true), method.name, bodies, LET_IN_AFTER);
                outcome.await == Outcome::Unconnected
            })
            .await;
            for (form, (kind, by)) in
                FORMS.iter().flat_map(|form| outside.each_ref().map(|by| (form, by)))
            {
                let by = (*kind, by);
                target.check(by, *form, method.name, bodies, Outcome::Unconnected).await;
            }
        }
        for (number, method) in methods.iter().enumerate() {
            let (target, bodies) = (lab.target(method), &requests[method.name]);
            let (kind, by) = &outside[number % outside.len()];
            let form = FORMS[number / outside.len() % FORMS.len()];
            target.check((kind, by), form, method.name, bodies, Outcome::Unconnected).await;
        }
        let checks = methods.iter().flat_map(|method| FORMS.map(|form| (*method, form)));
        let checks = checks.enumerate().map(|(number, (method, form))| {
            // Another one each time: who is refused often is turned away without being judged.
            let powerless = Request { name: format!("user{number}"), ..wanted(&["Nothing.AtAll"]) };
            let powerless = connector(&ca_pem, Some(&lab.authority().issue(&powerless).unwrap()));
            let machine = Request {
                name: format!("machine{number}"),
                kind: IdentityKind::Machine,
                powers: Some(Set::Subd.powers()),
                ..Request::default()
            };
            let machine = connector(&ca_pem, Some(&lab.authority().issue(&machine).unwrap()));
            let (target, bodies) = (lab.target(&method), requests[method.name].clone());
            let right = connector(&ca_pem, Some(&lab.issue(&[method.name])));
            let nobody = nobody.clone();
            async move {
                let name = method.name;
                let by = ("without a certificate", &nobody);
                target.check(by, form, name, &bodies, Outcome::Denied).await;
                let want = match method.access {
                    Access::Authenticated => Outcome::LetIn,
                    Access::Power | Access::PowerOrOwner => Outcome::Denied,
                };
                let by = ("with another power", &powerless);
                target.check(by, form, name, &bodies, want).await;
                let want = match name {
                    GetObjects::NAME => Outcome::LetIn,
                    // Whatever its powers: it could learn of other machines.
                    CountKeptFiles::NAME | GetGenerators::NAME | GetResources::NAME => {
                        Outcome::Denied
                    }
                    _ => want,
                };
                target.check(("by another machine", &machine), form, name, &bodies, want).await;
                let by = ("with the power", &right);
                target.check(by, form, name, &bodies, Outcome::LetIn).await;
            }
        });
        futures_util::stream::iter(checks).buffer_unordered(8).collect::<Vec<()>>().await;
        // A daemon is none of another name.
        for method in daemons.values() {
            let (target, bodies) = (lab.target(method), &requests[method.name]);
            let other = Target { name: ServerName::try_from("other").unwrap(), ..target };
            let right = connector(&ca_pem, Some(&lab.issue(&[method.name])));
            let by = ("under another name", &right);
            other.check(by, (true, true), method.name, bodies, Outcome::Unconnected).await;
        }
    });
}
