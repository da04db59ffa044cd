//! TLS over real sockets: who is let in, who is believed, and for how long.

mod crowd;
mod lab;

use std::fs;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use api::Done;
use api::access::IdentityKind;
use api::dominator::{ListSubs, ListSubsReply, ListSubsRequest};
use api::fault::FaultCode;
use api::image_server::DeleteImage;
use api::subd::{
    Commit, CommitRequest, GetConfiguration, ReplaceCertificate, ReplaceCertificateRequest,
};
use certs::authority::{AuthorityOptions, Request};
use model::escape::ByteText;
use rpc::client::{CallError, Client, Peer, Remedy};
use rpc::server::{Router, ServerLimits};
use rpc::tls::Security;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::wire::Server;
use lab::{Authority, Lab, Wanted, peer};

/// A server that tells who calls: `Commit` needs a power, `ListSubs` a certificate, and
/// `DeleteImage` is for owners, of which it has none.
fn router(security: &Security) -> Router {
    Router::new("testd", security)
        .method::<Commit, _>(|(), _, _| async { Ok(Done {}) })
        .method::<GetConfiguration, _>(|(), _, ()| async { Ok(Default::default()) })
        .method::<ListSubs, _>(|(), _, _| async { Ok(ListSubsReply { subs: Vec::new() }) })
        .method::<DeleteImage, _>(|(), _, _| async { Ok(Done {}) })
}

async fn served(lab: &Lab) -> Server {
    Server::start(router(&lab.open("server"))).await
}

/// What calling the three methods gives.
async fn outcomes(client: &Client) -> Vec<String> {
    let told = |result: Result<(), CallError>| match result {
        Ok(()) => "done".to_owned(),
        Err(error) => match error.code() {
            Some(code) => format!("{code:?}"),
            None => model::display::error_chain(&error),
        },
    };
    let commit = client.call::<Commit>(&CommitRequest { update_id: 2 }).await;
    let get = client.call::<ListSubs>(&ListSubsRequest::default()).await;
    let name = "a/b".parse().unwrap();
    let delete = api::image_server::DeleteImageRequest { name, force: false };
    let delete = client.call::<DeleteImage>(&delete).await;
    vec![told(commit.map(drop)), told(get.map(drop)), told(delete.map(drop))]
}

#[tokio::test]
async fn callers_get_what_their_certificates_say() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let between = lab.authority.intermediate("between");
    let wanted = |name, powers| Wanted { name, powers, ..Wanted::default() };
    let all = ["done", "done", "done"];
    let table = [
        ("all", wanted("alice", Some(&["*.*"][..])), all),
        ("commit", wanted("bob", Some(&["Subd.Commit"][..])), ["done", "done", "Denied"]),
        ("delete", wanted("eve", Some(&["Image*.Delete*"][..])), ["Denied", "done", "done"]),
        ("nothing", wanted("carol", Some(&[][..])), ["Denied", "done", "Denied"]),
        ("seed", wanted("Subd.Commit,ImageServer.*", None), all),
        ("plain", wanted("web1.example.org", None), ["Denied", "done", "Denied"]),
    ];
    for (dir, wanted, want) in table {
        lab.issue(dir, &wanted);
        assert_eq!(outcomes(&lab.client(dir, server.address)).await, want, "{dir}");
        between.issue(&lab.dir("deeper"), &wanted, &[&lab.authority]);
        assert_eq!(outcomes(&lab.client("deeper", server.address)).await, want, "{dir}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_caller_that_changes_too_much_is_refused_for_a_moment() {
    let lab = Lab::new();
    let security = lab.open("server");
    let router = router(&security).limits(ServerLimits::SERVER.with_changes(1));
    let server = Server::start(router).await;
    for name in ["alice", "bob"] {
        lab.issue(name, &Wanted { name, powers: Some(&["*.*"][..]), ..Wanted::default() });
    }
    let [alice, bob] = ["alice", "bob"].map(|name| lab.client(name, server.address));
    let commit = CommitRequest { update_id: 2 };
    let mut refusal = None;
    for _ in 0..100 {
        refusal = alice.call::<Commit>(&commit).await.err();
        if refusal.is_some() {
            break;
        }
    }
    let refusal = refusal.unwrap();
    assert_eq!((refusal.code(), refusal.remedy()), (Some(FaultCode::Throttled), Remedy::Wait));
    let text = model::display::error_chain(&refusal);
    assert!(text.contains("alice changes more than 1 things a second: try again in"), "{text}");
    // What only tells is answered, and so is what frees space.
    assert_eq!(outcomes(&alice).await[1..], ["done", "done"]);
    assert_eq!(outcomes(&bob).await, ["done"; 3]);
    server.stop().await;
}

#[tokio::test]
async fn a_certificate_that_is_not_good_opens_nothing() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let all = Wanted { name: "alice", powers: Some(&["*.*"]), ..Wanted::default() };
    let foreign = Authority::new("foreign");
    let twin = Authority::new("fleet");
    foreign.issue(&lab.dir("foreign"), &all, &[&lab.authority]);
    twin.issue(&lab.dir("twin"), &all, &[&lab.authority]);
    lab.issue("ended", &Wanted { has_ended: true, ..all.clone() });
    lab.issue("future", &Wanted { is_future: true, ..all.clone() });
    let table = [
        ("foreign", "is of no authority that it trusts"),
        ("twin", "is not signed by the authority that it names"),
        ("ended", "has ended, or is not valid yet, by its clock"),
        ("future", "has ended, or is not valid yet, by its clock"),
    ];
    for (dir, why) in table {
        let texts = outcomes(&lab.client(dir, server.address)).await;
        for text in &texts {
            assert!(text.ends_with(why), "{dir}: {texts:?}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_server_is_believed_only_under_the_name_that_was_asked_for() {
    let lab = Lab::new();
    let client =
        lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let hosts: &[&str] = &["testd.example.org"];
    let good = Wanted { name: "testd", hosts, ..Wanted::default() };
    let foreign = Authority::new("foreign");
    lab.issue("good", &good);
    foreign.issue(&lab.dir("foreign"), &good, &[&foreign, &lab.authority]);
    lab.issue("ended", &Wanted { has_ended: true, ..good.clone() });
    lab.issue("other", &Wanted { hosts: &["other.example.org"], ..good.clone() });
    lab.issue("name-only", &Wanted { name: "testd.example.org", hosts: &[], ..good.clone() });
    let security = Security::open(&client).unwrap();
    let table = [
        ("good", None),
        ("foreign", Some("its certificate is of no authority in our ca.pem")),
        ("ended", Some("its certificate has ended (or a clock is wrong)")),
        ("other", Some("its certificate is for other.example.org, and not for testd.example.org")),
        ("name-only", Some("its certificate is for no name, testd.example.org was expected")),
    ];
    for (dir, refused) in table {
        let server = Server::start(router(&lab.open(dir))).await;
        let client = Client::new(peer(server.address), &security);
        let got = client.call::<ListSubs>(&ListSubsRequest::default()).await;
        match refused {
            None => drop(got.unwrap()),
            Some(why) => {
                let error = got.unwrap_err();
                assert!(matches!(error, CallError::Connect { .. }), "{dir}: {error:?}");
                let text = model::display::error_chain(&error);
                assert!(text.contains(why), "{dir}: {text}");
            }
        }
        server.stop().await;
    }
    // By its address: the name that counts is the one that was asked for.
    let server = served(&lab).await;
    let by_address = Peer::parse(&server.address.to_string(), 0).unwrap();
    Client::new(by_address, &security).call::<ListSubs>(&ListSubsRequest::default()).await.unwrap();
    let other = Peer::parse("127.0.0.2", server.address.port()).unwrap();
    let other = other.at(Some(server.address.ip()));
    let error = Client::new(other, &security)
        .call::<ListSubs>(&ListSubsRequest::default())
        .await
        .unwrap_err();
    let text = model::display::error_chain(&error);
    assert!(text.contains("and not for 127.0.0.2: use a name"), "{text}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_no_way_back_to_plain_text() {
    let lab = Lab::new();
    lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let server = served(&lab).await;
    let plain = Client::new(peer(server.address), &Security::Insecure);
    let error = plain.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap_err();
    let text = model::display::error_chain(&error);
    assert!(text.contains("this port speaks TLS only: --tls"), "{text}");
    let reply = String::from_utf8(curl(&[&format!("http://{}/", server.address)])).unwrap();
    assert_eq!(reply.trim_end(), "This port speaks TLS only: use https, or --tls DIR.");
    server.stop().await;
    let insecure = Server::start(router(&Security::Insecure)).await;
    let error =
        lab.client("client", insecure.address).call::<ListSubs>(&ListSubsRequest::default()).await;
    let error = error.unwrap_err();
    // It may be the wrong address.
    assert_eq!(error.connect_hint("is it this address?"), Some("is it this address?"));
    let text = model::display::error_chain(&error);
    assert!(text.contains("does not speak TLS"), "{text}");
    insecure.stop().await;
}

fn curl(arguments: &[&str]) -> Vec<u8> {
    let mut curl = Command::new("curl");
    let output = output_of(curl.args(["-sS", "--max-time", "20"]).args(arguments));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn output_of(command: &mut Command) -> std::process::Output {
    command.stdin(Stdio::null()).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn others_speak_the_same_tls() {
    let lab = Lab::new();
    let dir =
        lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let server = served(&lab).await;
    let file = |name: &str| dir.join(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("cert.pem"), file("key.pem"));
    let at = format!("testd.example.org:{}:127.0.0.1", server.address.port());
    let url = |path: &str| format!("https://testd.example.org:{}{path}", server.address.port());
    let call = url("/rpc/Subd.GetConfiguration");
    for version in [&["--http1.1"][..], &["--http2"], &["--tls-max", "1.2"]] {
        let anybody = ["--cacert", &ca, "--resolve", &at];
        let json = ["-H", "content-type: application/json", "-d", ""];
        let health = curl(&[version, &anybody, &[&url("/healthz")]].concat());
        assert_eq!(health, b"ok\n");
        let mine = ["--cert", &cert, "--key", &key];
        let known = curl(&[version, &anybody, &mine, &json, &[&call]].concat());
        assert!(known.starts_with(b"{\"scan\""), "{}", String::from_utf8_lossy(&known));
        let unknown = curl(&[version, &anybody, &json, &[&call]].concat());
        let text = String::from_utf8(unknown).unwrap();
        let why = "a caller without a certificate may not call Subd.GetConfiguration";
        assert!(text.contains(why), "{text}");
    }
    let old = ["--tls-max", "1.1", "--cacert", &ca, "--resolve", &at];
    let address = url("/healthz");
    let refused = output_of(Command::new("curl").arg("-sS").args(old).arg(&address));
    assert!(!refused.status.success(), "TLS 1.1 was spoken");
    server.stop().await;
}

/// Calls `GetConfiguration` until it is refused.
async fn until_refused(client: &Client) -> CallError {
    loop {
        if let Err(error) = client.call::<ListSubs>(&ListSubsRequest::default()).await {
            return error;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A server on which `Commit` waits for ever; what comes says that one has begun.
async fn parking(lab: &Lab) -> (Server, mpsc::Receiver<()>) {
    let (begun, waiting) = mpsc::channel(8);
    let router = router(&lab.open("server")).method::<Commit, _>(move |(), _, _| {
        let begun = begun.clone();
        async move {
            begun.send(()).await.unwrap();
            std::future::pending().await
        }
    });
    (Server::start(router).await, waiting)
}

async fn park(client: &Client) -> Result<Done, CallError> {
    client.call_within::<Commit>(&CommitRequest { update_id: 2 }, Duration::from_secs(600)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_is_revoked_is_cut_off_with_what_it_waits_for() {
    let lab = Lab::new();
    let all = Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() };
    lab.issue("bad", &Wanted { serial: 66, ..all.clone() });
    lab.issue("good", &Wanted { serial: 67, ..all });
    let (server, mut waiting) = parking(&lab).await;
    let (bad, good) = (lab.client("bad", server.address), lab.client("good", server.address));
    let poll = {
        let bad = bad.clone();
        tokio::spawn(async move { park(&bad).await })
    };
    let other = {
        let good = good.clone();
        tokio::spawn(async move { park(&good).await })
    };
    waiting.recv().await.unwrap();
    waiting.recv().await.unwrap();
    fs::write(lab.dir("server").join("crl.pem"), lab.authority.revoked(&[66], 1)).unwrap();
    let lost = poll.await.unwrap().unwrap_err();
    assert!(matches!(lost, CallError::Lost { .. }), "{lost:?}");
    bad.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap_err();
    good.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap();
    assert!(!other.is_finished());
    other.abort();
    // What was revoked by mistake is good again.
    fs::write(lab.dir("server").join("crl.pem"), lab.authority.revoked(&[], 2)).unwrap();
    while bad.call::<ListSubs>(&ListSubsRequest::default()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_machine_whose_certificate_has_ended_is_called_only_to_replace_it() {
    let lab = Lab::new();
    let client =
        lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let hosts: &[&str] = &["testd.example.org"];
    let ended =
        Wanted { name: "testd", hosts, has_ended: true, is_machine: true, ..Wanted::default() };
    let foreign = Authority::new("foreign");
    lab.issue("good", &ended);
    lab.issue("valid", &Wanted { has_ended: false, ..ended.clone() });
    lab.issue("revoked", &Wanted { serial: 9, ..ended.clone() });
    lab.issue("other", &Wanted { hosts: &["other.example.org"], ..ended.clone() });
    lab.issue("service", &Wanted { is_machine: false, ..ended.clone() });
    foreign.issue(&lab.dir("foreign"), &ended, &[&foreign, &lab.authority]);
    fs::write(client.join("crl.pem"), lab.authority.revoked(&[9], 1)).unwrap();
    let security = Security::open(&client).unwrap();
    // They ended at the start of 2021.
    let since = system::clock::wall().seconds.cast_unsigned() - 1_609_459_200;
    let [long, short] = [since + 86_400, since - 86_400].map(Duration::from_secs);
    let has_ended = "its certificate has ended (or a clock is wrong)";
    let table = [
        ("good", long, None),
        ("valid", long, None),
        ("good", short, Some(has_ended)),
        ("revoked", long, Some("its certificate was revoked")),
        ("other", long, Some("its certificate is for other.example.org, and not for testd")),
        ("service", long, Some("its certificate has ended, and does not say that it is a machine")),
        ("foreign", long, Some("its certificate is of no authority in our ca.pem")),
    ];
    for (dir, within, refused) in table {
        let router = router(&lab.open(dir)).method::<ReplaceCertificate, _>(|(), _, request| {
            assert_eq!(request.chain.0, b"chain");
            async { Ok(Done {}) }
        });
        let server = Server::start(router).await;
        let plain = Client::new(peer(server.address), &security);
        let plain = plain.call::<ListSubs>(&ListSubsRequest::default()).await;
        let has_ended = plain.is_err_and(|error| error.is_of_ended_certificate());
        assert_eq!(has_ended, dir != "valid", "{dir}");
        let client = Client::of_ended(peer(server.address), &security, within);
        let chain = ReplaceCertificateRequest { chain: ByteText(b"chain".to_vec()) };
        let replaced = client.call::<ReplaceCertificate>(&chain).await;
        match refused {
            Some(why) => {
                let text = model::display::error_chain(&replaced.unwrap_err());
                assert!(text.contains(why), "{dir}: {text}");
            }
            None => {
                replaced.unwrap();
                assert!(client.connected_key().await.unwrap().is_some());
                let other = client.call::<ListSubs>(&ListSubsRequest::default()).await;
                let text = model::display::error_chain(&other.unwrap_err());
                assert!(text.ends_with("is called for nothing else than to replace it"), "{text}");
                let page = client.get("/").await;
                assert!(matches!(page, Err(CallError::Protocol { .. })), "{page:?}");
            }
        }
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_revoked_is_left_with_what_is_waited_for() {
    let lab = Lab::new();
    let hosts = &["testd.example.org"];
    lab.issue("server", &Wanted { name: "testd", hosts, serial: 5, ..Wanted::default() });
    lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let (server, mut waiting) = parking(&lab).await;
    let security = lab.open("client");
    let keeping = tokio::spawn({
        let security = security.clone();
        async move { security.reload_until(Default::default()).await }
    });
    let client = Client::new(peer(server.address), &security);
    let poll = {
        let client = client.clone();
        tokio::spawn(async move { park(&client).await })
    };
    waiting.recv().await.unwrap();
    fs::write(lab.dir("client").join("crl.pem"), lab.authority.revoked(&[5], 1)).unwrap();
    let lost = poll.await.unwrap().unwrap_err();
    assert!(matches!(lost, CallError::Lost { .. }), "{lost:?}");
    let error = client.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap_err();
    let text = model::display::error_chain(&error);
    assert!(text.ends_with("its certificate was revoked"), "{text}");
    keeping.abort();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_read_again_when_they_change_and_kept_when_they_are_wrong() {
    let lab = Lab::new();
    let all = Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() };
    lab.issue("client", &all);
    let server = served(&lab).await;
    let client = || lab.client("client", server.address);
    client().call::<ListSubs>(&ListSubsRequest::default()).await.unwrap();
    // A new authority takes the old one's place, on one side first.
    let next = Authority::new("next");
    let hosts = &["testd.example.org"];
    let of_server = Wanted { name: "testd", hosts, ..Wanted::default() };
    next.issue(&lab.dir("server"), &of_server, &[&next, &lab.authority]);
    let refused = async {
        loop {
            let result = client().call::<ListSubs>(&ListSubsRequest::default()).await;
            if let Err(error) = result {
                return model::display::error_chain(&error);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = refused.await;
    assert!(text.contains("no authority in our ca.pem"), "{text}");
    let both = format!("{}{}", lab.authority.pem, next.pem);
    fs::write(lab.dir("client").join("ca.pem"), both).unwrap();
    client().call::<ListSubs>(&ListSubsRequest::default()).await.unwrap();
    // A key of another certificate is not taken.
    let former = fs::read_to_string(lab.dir("server").join("key.pem")).unwrap();
    let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
    lab::write_key(&lab.dir("server"), &other);
    let error = Security::open(&lab.dir("server")).unwrap_err().to_string();
    assert!(error.ends_with("the certificate in cert.pem is not of the key in key.pem"), "{error}");
    tokio::time::sleep(Duration::from_millis(4_500)).await;
    client().call::<ListSubs>(&ListSubsRequest::default()).await.unwrap();
    lab::write_key(&lab.dir("server"), &former);
    server.stop().await;
}

/// A connection that has sent nothing yet when the server gets another certificate.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_request_is_answered_also_after_the_certificate_has_changed() {
    let lab = Lab::new();
    lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let server = served(&lab).await;
    let (dir, name) = (lab.dir("client"), ServerName::try_from("testd.example.org").unwrap());
    let chain = CertificateDer::pem_file_iter(dir.join("cert.pem")).unwrap();
    let chain = chain.collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap();
    let config = Arc::new(crowd::trusting(&lab).with_client_auth_cert(chain, key).unwrap());
    let connect = async || {
        let stream = TcpStream::connect(server.address).await.unwrap();
        TlsConnector::from(Arc::clone(&config)).connect(name.clone(), stream).await.unwrap()
    };
    let shown = |stream: &TlsStream<TcpStream>| {
        stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
    };
    let mut first = connect().await;
    lab.issue(
        "server",
        &Wanted { name: "testd", hosts: &["testd.example.org"], ..Wanted::default() },
    );
    while shown(&connect().await) == shown(&first) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(crowd::page(&mut first, "/healthz").await.unwrap(), "ok\n");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_connects_again_when_it_has_another_certificate() {
    let lab = Lab::new();
    lab.issue("client", &Wanted { name: "a", powers: Some(&[]), ..Wanted::default() });
    let server = served(&lab).await;
    let security = lab.open("client");
    let keeping = tokio::spawn({
        let security = security.clone();
        async move { security.reload_until(Default::default()).await }
    });
    let client = Client::new(peer(server.address), &security);
    assert_eq!(outcomes(&client).await, ["Denied", "done", "Denied"]);
    lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    while outcomes(&client).await != ["done", "done", "done"] {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    keeping.abort();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_may_vouch_for_no_more_than_its_zone() {
    let lab = Lab::new();
    let web = Authority::new("web");
    let all = Wanted { name: "w", powers: Some(&["*.*"]), ..Wanted::default() };
    web.issue(&lab.dir("caller"), &all, &[&lab.authority, &web]);
    let both = format!("{}{}", lab.authority.pem, web.pem);
    fs::write(lab.dir("server").join("ca.pem"), both).unwrap();
    let server = served(&lab).await;
    let caller = lab.client("caller", server.address);
    assert_eq!(outcomes(&caller).await, ["done", "done", "done"]);
    // Connections that there are, too, are of the zone at once.
    let zones = lab.dir("server").join("zones.toml");
    fs::write(&zones, "[[zone]]\nauthority = 'web'\nmethods = ['Subd.Commit']\n").unwrap();
    let refused = until_refused(&caller).await;
    assert!(matches!(refused.code(), Some(FaultCode::Denied) | None), "{refused:?}");
    while outcomes(&caller).await != ["done", "Denied", "Denied"] {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.stop().await;
    fs::remove_file(&zones).unwrap();
    // Nor for a server of another name.
    let hosts = &["testd.example.org"];
    let of_server = Wanted { name: "testd", hosts, ..Wanted::default() };
    web.issue(&lab.dir("server"), &of_server, &[&lab.authority, &web]);
    let server = served(&lab).await;
    let zones = lab.dir("caller").join("zones.toml");
    let get = async || {
        let got = lab
            .client("caller", server.address)
            .call::<ListSubs>(&ListSubsRequest::default())
            .await;
        got.map_err(|error| model::display::error_chain(&error))
    };
    for (names, want) in [("'*.example.org'", true), ("'other'", false), ("", false)] {
        let text = format!("[[zone]]\nauthority = 'web'\nservers = [{names}]\n");
        fs::write(&zones, text).unwrap();
        let got = get().await;
        assert_eq!(got.is_ok(), want, "{names}: {got:?}");
        if let Err(text) = got {
            let why = "its authority may not vouch for servers called testd.example.org";
            assert!(text.contains(why), "{text}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn who_has_the_key_of_an_authority_for_machines_is_no_other_server_and_no_operator() {
    let lab = Lab::new();
    let options = AuthorityOptions { for_machines: true, ..AuthorityOptions::default() };
    let machines = certs::authority::Authority::create(&options).unwrap();
    let request = Request {
        name: "testd".to_owned(),
        hosts: vec!["testd.example.org".to_owned()],
        kind: IdentityKind::Service,
        powers: Some(vec!["*.*".to_owned()]),
        ..Request::default()
    };
    let dir = lab.dir("machine");
    let ca_pem = format!("{}{}", lab.authority.pem, machines.ca_pem());
    let issued = machines.issue(&request).unwrap();
    issued.write(&dir, &ca_pem, certs::files::Replace::Own).unwrap();
    fs::write(lab.dir("server").join("ca.pem"), &ca_pem).unwrap();
    lab.issue("client", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    fs::write(lab.dir("client").join("ca.pem"), &ca_pem).unwrap();

    let server = served(&lab).await;
    let as_caller = outcomes(&lab.client("machine", server.address)).await;
    assert_eq!(as_caller, ["Denied", "done", "Denied"]);
    server.stop().await;

    let server = Server::start(router(&lab.open("machine"))).await;
    let refused = |method: &str| {
        format!(
            "{method} at testd.example.org:{} (at 127.0.0.1): the authority of the server \
             certifies machines only, and no machine answers this: another server is at this \
             address",
            server.address.port()
        )
    };
    let want =
        ["done".to_owned(), refused("Dominator.ListSubs"), refused("ImageServer.DeleteImage")];
    assert_eq!(outcomes(&lab.client("client", server.address)).await, want);
    server.stop().await;
}

/// What is done to a directory with certificates.
type Change<'a> = &'a dyn Fn(&std::path::Path);

#[test]
fn files_that_cannot_be_used_are_named_with_what_is_wrong() {
    use std::os::unix::fs::PermissionsExt as _;
    let lab = Lab::new();
    let all = Wanted { name: "a", ..Wanted::default() };
    let refused = |change: &dyn Fn(&std::path::Path)| {
        let dir = lab.issue("changed", &all);
        change(&dir);
        let error = Security::open(&dir).unwrap_err();
        let text = model::display::error_chain(&error);
        fs::remove_dir_all(&dir).unwrap();
        text.replace(&format!("{}/", dir.display()), "").replace(&dir.display().to_string(), "DIR")
    };
    let write = |name: &'static str, text: &'static str| {
        move |dir: &std::path::Path| fs::write(dir.join(name), text).unwrap()
    };
    let remove =
        |name: &'static str| move |dir: &std::path::Path| fs::remove_file(dir.join(name)).unwrap();
    let open = |dir: &std::path::Path| {
        fs::set_permissions(dir.join("key.pem"), fs::Permissions::from_mode(0o644)).unwrap();
    };
    let nothing = |dir: &std::path::Path| {
        for name in ["ca.pem", "cert.pem", "key.pem"] {
            fs::remove_file(dir.join(name)).unwrap();
        }
    };
    #[rustfmt::skip]
    let table: [(Change<'_>, &str); 14] = [
        (&nothing, "there is no certificate in DIR"),
        (&remove("key.pem"), "cannot read key.pem: No such file or directory (os error 2)"),
        (&remove("ca.pem"), "cannot read ca.pem: No such file or directory (os error 2)"),
        (&write("cert.pem", "hello"), "cert.pem: it holds no certificate in PEM"),
        (&write("key.pem", ""), "key.pem: it holds no private key in PEM (PKCS#8, PKCS#1 or SEC1, without passphrase)"),
        (&open, "key.pem can be read by every user of this machine: chmod 600 it, and have its certificate revoked if somebody may have read it"),
        (&write("ca.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "ca.pem: invalid certificate 1: "),
        (&write("crl.pem", "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"), "crl.pem: list 1 cannot be used: it is no list of revoked certificates"),
        (&write("crl.pem", ""), "crl.pem: it holds no list of revoked certificates in PEM (X509 CRL): copy it again, or remove it if nothing is revoked"),
        (&write("crl.pem", "-----BEGIN CRL-----\nAAAA\n-----END CRL-----\n"), "crl.pem: it holds no list of revoked certificates in PEM"),
        (&write("crl.pem", "-----BEGIN X509 CRL-----\nAAAA\n"), "crl.pem: it is not PEM: "),
        (&write("zones.toml", ""), "zones.toml: it names no zone: copy it again, or remove it if no authority is to be limited"),
        (&write("zones.toml", "# none\n"), "zones.toml: it names no zone"),
        (&write("zones.toml", "[[zone]]\nauthority = 'x'\n"), "zones.toml: a zone is of the authority `x`, which is not in ca.pem: a zone that limits nothing is a mistake"),
    ];
    for (change, want) in table {
        let got = refused(change);
        assert!(got.starts_with(want), "{got}\n{want}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_a_caller_whose_request_is_on_its_way() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let url = format!("https://{}/rpc/Subd.GetConfiguration", server.address);
    let ca = lab.dir("server").join("ca.pem").display().to_string();
    let large = lab.dir("server").join("large.json");
    fs::write(&large, vec![b' '; 200_000]).unwrap();
    let large = format!("@{}", large.display());
    let json = "content-type: application/json";
    let other = "sec-fetch-site: cross-site";
    let page = format!("https://{}/metrics", server.address);
    let refusals: [(&str, &str, &str); 3] = [
        (&url, json, "\"code\":\"denied\""),
        (&url, other, "A page of another site must not call methods here."),
        (&page, json, "Pages are only read, with GET or HEAD."),
    ];
    for version in ["--http1.1", "--http2"] {
        for body in ["null", &large] {
            for (url, header, refusal) in refusals {
                for _ in 0..20 {
                    let call = [version, "--cacert", &ca, "-H", header, "--data-binary", body, url];
                    let said = String::from_utf8(curl(&call)).unwrap();
                    assert!(said.contains(refusal), "{version}: {said}");
                }
            }
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_certificate_is_in_the_metrics() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let address: SocketAddr = server.address;
    let url = format!("https://{address}/metrics");
    let ca = lab.dir("server").join("ca.pem").display().to_string();
    let text = String::from_utf8(curl(&["--cacert", &ca, &url])).unwrap();
    // 2100-01-01.
    assert!(text.contains("dominator_certificate_end_timestamp_seconds 4102444800\n"), "{text}");
    server.stop().await;
}
