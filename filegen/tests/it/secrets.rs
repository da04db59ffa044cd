//! Who may read what is made, and what nobody may.

use api::access::IdentityKind;
use api::fault::FaultCode;
use api::file_generator::{
    Generate, GenerateRequest, GeneratedFile, GetContents, GetContentsRequest, GetGenerators,
    GetGeneratorsRequest,
};
use certs::sets::Set;
use model::object::ObjectId;
use rpc::client::CallError;

use crate::server::{Server, contains, machine, secrets};

const SECRET: &str = "correct horse battery staple";

const CONFIG: &str = r#"
[[generator]]
path = "/etc/key"
kind = "template"
file = "key.j2"
secret = true

[[generator]]
path = "/etc/password"
kind = "program"
command = ["bin/password"]

[[generator]]
path = "/etc/motd"
kind = "file"
file = "motd"
"#;

async fn with_secrets() -> Server {
    let mut server = Server::secured();
    server.write("key.j2", &format!("{SECRET} of {{{{ Location }}}}\n"));
    let script = format!("printf '{{\"Data\": \"%s\"}}' \"$(echo {SECRET} | base64 -w0)\"");
    server.program("bin/password", &script);
    server.write("motd", "Welcome\n");
    server.configure(CONFIG);
    server.start().await;
    server
}

fn code<T>(result: Result<T, CallError>) -> Option<FaultCode> {
    result.err().map(|error| error.code().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_for_the_machines_that_it_was_made_for_and_its_readers_are_recorded() {
    let server = with_secrets().await;
    let (web1, web2) = (machine("web1", "nyc"), machine("web2", "nyc"));
    let paths = ["/etc/key", "/etc/password", "/etc/motd"];
    let expected = [format!("{SECRET} of nyc\n"), format!("{SECRET}\n"), "Welcome\n".to_owned()];
    assert_eq!(server.files(&web1, &paths).await, expected.map(Ok));

    let made = server.generate(&[web1], &paths).await.remove(0);
    let ids: Vec<_> = made
        .into_iter()
        .map(|file| match file {
            GeneratedFile::Made(made) => made.id,
            GeneratedFile::Failed(why) => panic!("{why}"),
        })
        .collect();
    // It is no content for all, and not yet for web2.
    let request = GetContentsRequest { ids: ids.clone() };
    let reply = server.client.call::<GetContents>(&request).await.unwrap();
    assert_eq!(reply.absent, ids[..2]);
    assert_eq!(reply.contents[0].bytes.0, b"Welcome\n");
    let for_web2 = secrets(&server.client, ids[0], "web2").await.unwrap();
    assert_eq!((for_web2.absent, for_web2.contents), (vec![ids[0]], Vec::new()));
    server.generate(&[web2], &["/etc/key"]).await;
    let for_web2 = secrets(&server.client, ids[0], "web2").await.unwrap();
    assert_eq!(for_web2.contents.len(), 1);

    let records = server.audited("FileGenerator.GetSecrets");
    let arguments = |host: &str| format!("contents=1 machines={host}");
    let expected: Vec<String> = ["web1", "web1", "web2", "web2"]
        .iter()
        .map(|host| format!("service dominator begun {}", arguments(host)))
        .collect();
    let begun: Vec<String> =
        records.into_iter().filter(|record| record.contains(" begun ")).collect();
    assert_eq!(begun, expected);
    let told = format!("{}{}", server.page("/").await, server.metrics().await);
    assert!(!told.contains(SECRET), "{told}");
    assert!(!server.log().contains(SECRET));
    assert!(!contains(&server.path("state"), SECRET));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_power_for_secrets_opens_them_and_no_machine_gets_anything() {
    let server = with_secrets().await;
    let made = server.generate(&[machine("web1", "nyc")], &["/etc/key"]).await.remove(0);
    let [GeneratedFile::Made(made)] = &*made else { panic!("{made:?}") };
    let powers = Set::Operator.powers();
    let powers: Vec<&str> = powers.iter().map(String::as_str).collect();
    let callers = [
        (
            "operator",
            Set::Operator.kind(),
            &powers[..],
            [None, None, None, Some(FaultCode::Denied)],
        ),
        (
            "nothing",
            IdentityKind::User,
            &[],
            [None, Some(FaultCode::Denied), Some(FaultCode::Denied), Some(FaultCode::Denied)],
        ),
        ("web1", IdentityKind::Machine, &["*.*"], [Some(FaultCode::Denied); 4]),
        (
            "secrets",
            IdentityKind::User,
            &["FileGenerator.GetSecrets"],
            [None, Some(FaultCode::Denied), Some(FaultCode::Denied), None],
        ),
    ];
    for (name, kind, powers, expected) in callers {
        let client = server.client_with(name, kind, powers);
        let got = [
            code(client.call::<GetGenerators>(&GetGeneratorsRequest::default()).await),
            code(client.call::<Generate>(&GenerateRequest::default()).await),
            code(client.call::<GetContents>(&GetContentsRequest { ids: vec![made.id] }).await),
            code(secrets(&client, made.id, "web1").await),
        ];
        assert_eq!(got, expected, "{name}");
    }

    // So it is for the tool of an operator.
    let mdb = r#"[{"Hostname": "web1", "Location": "nyc"}]"#;
    server.write("fleet.json", mdb);
    let get = |path: &str| server.tool(&["get", "web1", path, "--mdb", "fleet.json"]);
    assert_eq!(get("/etc/motd"), (Some(0), "Welcome\n".to_owned(), String::new()));
    let (code, out, said) = get("/etc/key");
    assert_eq!((code, &*out), (Some(1), ""));
    assert!(said.contains("FileGenerator.GetSecrets"), "{said}");
    server.issue("operator", IdentityKind::User, &["FileGenerator.*"]);
    assert_eq!(get("/etc/key"), (Some(0), format!("{SECRET} of nyc\n"), String::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_says_nothing_of_a_secret() {
    let server = with_secrets().await;
    let (version, _) = server.next(None).await;
    server.write("key.j2", &format!("\n{{{{ \"{SECRET}\" + Hostname | int }}}}\n"));
    server.next(Some(version)).await;
    let why = server.file(&machine("web1", "nyc"), "/etc/key").await;
    assert_eq!(why, Err("the template fails in line 2".to_owned()));
    let told = format!("{}{}", server.page("/").await, server.log());
    assert!(!told.contains(SECRET), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_nothing_that_a_short_secret_can_be_guessed_from() {
    let mut server = Server::secured();
    server.write("pin", "1234");
    server.write("motd", "Welcome\n");
    let motd = "[[generator]]\npath = \"/motd\"\nkind = \"file\"\nfile = \"motd\"\n";
    let pin = "[[generator]]\npath = \"/pin\"\nkind = \"file\"\nfile = \"pin\"\nsecret = true\n";
    server.configure(motd);
    server.start().await;
    let (former, _) = server.next(None).await;
    let page = server.page("/").await;
    assert!(page.contains("content revision</th><td>1</td>"), "{page}");
    server.configure(&format!("{pin}{motd}"));
    let (whole, told) = server.next(Some(former)).await;
    let page = server.page("/").await;
    assert!(page.contains("content revision</th><td>2</td>"), "{page}");
    let shown = |version: &ObjectId| page.contains(&version.hex()[..12]);
    let [motd, pin] = &*told.generators else { panic!("{told:?}") };
    assert_eq!((shown(&motd.version), shown(&pin.version)), (true, false), "{page}");
    assert!(!shown(&whole), "{page}");
}
