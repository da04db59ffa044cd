//! Machines, services and people of one name: only people are owners.

use std::fs;
use std::process::Command;

use certs::authority::Request;
use certs::files::Replace;
use certs::sets::Set;
use localfleet::fleet::certificates::OPERATOR;
use localfleet::fleet::client_of;
use localfleet::fleet::daemon_process::Daemon;
use serde_json::Value;

use crate::image_life::Place;

/// Runs domtool, and gives its standard output.
fn domtool(place: &Place, words: &str) -> String {
    let output = Command::new(place.path("bin/domtool"))
        .args(words.split_whitespace())
        .current_dir(place.path(""))
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{words}: {}", text(output.stderr));
    text(output.stdout)
}

/// Makes the certificates of the machine, the service and the users called `alice`: those of
/// `domtool`, and one as earlier releases made it.
fn issue(place: &Place) {
    let authority = place.certificates.authority().unwrap();
    fs::create_dir(place.path("ca")).unwrap();
    fs::write(place.path("ca/ca.pem"), authority.ca_pem()).unwrap();
    fs::write(place.path("ca/ca.key"), authority.key_pem()).unwrap();
    fs::write(place.path("mdb"), r#"[{"Hostname": "alice"}]"#).unwrap();
    domtool(place, "cert issue --ca ca --out machines --mdb mdb --group web");
    let one = "cert issue --ca ca --name alice --group web";
    domtool(place, &format!("{one} --out service --host alice --set imageserver"));
    domtool(place, &format!("{one} --out user --set viewer"));
    let former = Request { name: "alice".to_owned(), ..Request::default() };
    let former = authority.issue(&former).unwrap();
    former.write(&place.path("former"), authority.ca_pem(), Replace::Own).unwrap();
}

/// Starts a replica of the image server of `place`. Returns it with its address.
fn replica(place: &Place) -> (Daemon, String) {
    let listener = std::net::TcpListener::bind("127.19.0.2:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    place.certificates.for_daemon("replica", Set::Imageserver, &["127.19.0.2"]).unwrap();
    let mut words = place.certificates.flags("replica");
    let data = place.path("replica").display().to_string();
    words.extend(
        ["--listen", &address, "--data", &data, "--replicate-from", &place.address]
            .map(str::to_owned),
    );
    let words = words.into_iter().map(Into::into).collect();
    let program = place.path("bin/imageserver");
    let daemon = Daemon::start("replica", &program, words, place.path("replica.log")).unwrap();
    let security = place.certificates.security(OPERATOR).unwrap();
    place.wait(&client_of(address.parse().unwrap(), &security));
    (daemon, address)
}

/// Who called what with which end, in the audit log of the image server.
fn audited(place: &Place) -> Vec<String> {
    let text = domtool(place, "audit show data/audit/audit.log --format json");
    let rows: Value = serde_json::from_str(&text).unwrap();
    let row = |row: &Value| {
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        format!("{} {} {}", text("user"), text("method"), text("outcome"))
    };
    let rows = rows.as_array().unwrap().iter().map(row);
    rows.filter(|row| row.contains("DeleteImage")).collect()
}

#[test]
fn a_machine_of_the_name_of_an_owner_is_no_owner() {
    let place = Place::new();
    issue(&place);
    let (replica, replica_address) = replica(&place);
    place.data(&["mkdir", "web", "--owner-user", "alice", "--owner-group", "web"]);
    for number in 1..=4 {
        let (name, content) = (format!("web/{number}"), number.to_string());
        place.add(&name, &content, &[]);
    }
    let delete = |by: &str, at: &str, image: &str| {
        let flags = ["--tls".to_owned(), place.path(by).display().to_string()];
        place.run_at(at, &flags, &["delete", image, "--yes"])
    };
    let refused = |what: &str| {
        format!(
            "error: ImageServer.DeleteImage at ADDRESS: {what} alice may not call \
             ImageServer.DeleteImage: it needs the power ImageServer.DeleteImage; owners are \
             users, and the certificate is that of a {what}\nexit 1\n"
        )
    };
    for at in [&place.address, &replica_address] {
        assert_eq!(delete("machines/alice", at, "web/1"), refused("machine"));
        assert_eq!(delete("service", at, "web/1"), refused("service"));
    }
    assert_eq!(delete("user", &place.address, "web/1"), "Deleted web/1.\nexit 0\n");
    assert_eq!(delete("user", &replica_address, "web/2"), "Deleted web/2.\nexit 0\n");
    let log = || fs::read_to_string(place.server.log()).unwrap();
    let is_warning = |line: &&str| line.contains("does not say that this is a user");
    assert_eq!(log().lines().find(is_warning), None);
    // The certificate of an earlier release is one of an owner for one release more.
    for image in ["web/3", "web/4"] {
        assert_eq!(delete("former", &place.address, image), format!("Deleted {image}.\nexit 0\n"));
    }
    let log = log();
    let warnings: Vec<&str> = log.lines().filter(is_warning).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    let want = "alice calls ImageServer.DeleteImage as an owner, and the certificate of alice does \
                not say that this is a user; the next release takes such a certificate for no \
                owner: issue it again with domtool cert issue --kind user";
    assert!(warnings[0].contains(want), "{}", warnings[0]);
    assert_eq!(
        audited(&place),
        [
            "machine alice ImageServer.DeleteImage denied",
            "service alice ImageServer.DeleteImage denied",
            "alice ImageServer.DeleteImage done",
            "alice ImageServer.DeleteImage done",
            "alice ImageServer.DeleteImage done",
        ]
    );
    drop(replica);
}
