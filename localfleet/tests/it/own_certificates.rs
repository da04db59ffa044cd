//! A fleet that renews the certificates of its machines: renewals, kills, a machine that was off
//! for too long, another authority, and a machine whose certificate is revoked.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::certificate::Certificate;
use api::dominator::Status;
use api::dominator::content::{ContentChange, ContentStage};
use certs::authority::{Authority, AuthorityOptions, Request};
use certs::pem::{certificates_of, key_belongs};
use certs::record::{Reason, RevocationTarget};
use certs::register::Register;
use localfleet::fleet::certificates::OPERATOR;
use testing::eventually;

use crate::computed::{add, contains};
use crate::converges::{CONVERGE_MAX, Scenario};
use crate::orders::domtool;
use crate::trees;

const IMAGE: &str = "test/1";

const DAEMONS: [&str; 4] = ["imageserver", "dominator", "filegen-server", OPERATOR];

/// Moves the TLS files of a sub below its root, as on a machine.
pub fn own_files_below_root(scenario: &mut Scenario, index: usize) -> PathBuf {
    let flags = scenario.fleet.certificates().flags(&scenario.fleet.subs[index].hostname);
    let before = PathBuf::from(&flags[1]);
    let sub = &mut scenario.fleet.subs[index];
    sub.daemon.stop().unwrap();
    let own = sub.root.join("etc/dominator/tls");
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    fs::rename(&before, &own).unwrap();
    std::os::unix::fs::symlink(&own, &before).unwrap();
    sub.daemon.start_again().unwrap();
    own
}

/// A fleet of three machines whose certificates, authorities and revocations are computed.
struct Renewing {
    scenario: Scenario,
    place: tempfile::TempDir,
    /// The TLS files of each machine.
    own: Vec<PathBuf>,
}

impl Renewing {
    fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let mut scenario = Scenario::start_with(3, &[("--renew-expired", "1")]);
        let own = (0..3).map(|index| own_files_below_root(&mut scenario, index)).collect();
        let certificates = scenario.fleet.certificates();
        certificates.make_authority_for_machines(&path("ca1")).unwrap();
        let authority = certificates.authority().unwrap();
        fs::write(path("ca.pem"), authority.ca_pem()).unwrap();
        fs::write(path("crl.pem"), authority.revocation_list(&[], 1).unwrap()).unwrap();
        let source = scenario.fleet.addresses().filegen.to_string();
        let names = ["cert.pem", "ca.pem", "crl.pem"];
        let line = |name: &str| format!("/etc/dominator/tls/{name} {source}\n");
        fs::write(path("computed"), names.map(line).concat()).unwrap();
        trees::make(&path("tree"), 1);
        fs::create_dir_all(path("tree/etc/dominator/tls")).unwrap();
        for name in names {
            fs::write(path("tree/etc/dominator/tls").join(name), "a placeholder").unwrap();
        }
        let filter = scenario.directory.path().join("filter");
        let lines = fs::read_to_string(&filter).unwrap() + "/etc/dominator/tls/key[.]pem$\n";
        fs::write(&filter, lines).unwrap();
        add(&scenario, IMAGE, &path("tree"), &path("computed"));
        let renewing = Self { scenario, place, own };
        renewing.configure("ca1");
        renewing
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Writes the configuration of filegen-server, with this authority.
    fn configure(&self, authority: &str) {
        let config = format!(
            "[[generator]]\npath = \"/etc/dominator/tls/cert.pem\"\nkind = \"certificate\"\n\
             authority = \"{authority}\"\npowers = [\"ObjectServer.GetObjects\"]\n\
             with_address = true\nlifetime = 30\nrenew_after = 10\n\
             [[generator]]\npath = \"/etc/dominator/tls/ca.pem\"\nkind = \"file\"\n\
             file = \"ca.pem\"\n\
             [[generator]]\npath = \"/etc/dominator/tls/crl.pem\"\nkind = \"file\"\n\
             file = \"crl.pem\"\n"
        );
        fs::write(self.path("config.toml"), config).unwrap();
    }

    /// The TLS directory of a daemon or tool.
    fn directory_of(&self, holder: &str) -> PathBuf {
        PathBuf::from(&self.scenario.fleet.certificates().flags(holder)[1])
    }

    /// The certificate of a machine, if it has the key for it.
    fn certificate(&self, index: usize) -> Result<Certificate, String> {
        let file = |name: &str| self.own[index].join(name);
        let chain = certificates_of(&file("cert.pem")).map_err(|error| error.to_string())?;
        match key_belongs(&file("key.pem"), &chain[0]) {
            Ok(true) => Certificate::read(&chain[0]).map_err(|error| error.to_string()),
            other => Err(format!("{other:?}")),
        }
    }

    /// Waits until all machines have another certificate than `before`, and returns these.
    fn renewed(&mut self, before: &[String]) -> Vec<String> {
        eventually("all machines have other certificates", || {
            self.scenario.fleet.check().unwrap();
            let serial = |index| Ok(self.certificate(index)?.serial);
            let now = (0..3).map(serial).collect::<Result<Vec<String>, String>>()?;
            let are_others = now.iter().zip(before).all(|(now, before)| now != before);
            if are_others { Ok(now) } else { Err(format!("{now:?}")) }
        })
    }

    fn serials(&self) -> Vec<String> {
        (0..3).map(|index| self.certificate(index).unwrap().serial).collect()
    }

    fn wait_synced(&mut self) {
        self.scenario.fleet.wait_synced(IMAGE, CONVERGE_MAX, |_| {}).unwrap();
    }

    /// Sets the authorities that all trust, machines last.
    fn trust(&mut self, authorities: &str) {
        for holder in DAEMONS {
            replace(&self.directory_of(holder).join("ca.pem"), authorities);
        }
        replace(&self.path("ca.pem"), authorities);
        eventually("all machines trust these authorities", || {
            let trusted = self.own.iter().map(|own| fs::read_to_string(own.join("ca.pem")));
            let trusted = trusted.collect::<Result<Vec<_>, _>>();
            let trusted = trusted.map_err(|error| error.to_string())?;
            if trusted.iter().all(|one| one == authorities) {
                Ok(())
            } else {
                Err(self
                    .scenario
                    .fleet
                    .statuses()
                    .map_or_else(|error| format!("{error:#}"), |subs| format!("{subs:?}")))
            }
        });
        self.wait_synced();
    }

    /// Certifies all daemons by another authority, and waits until they use that.
    fn certify_daemons(&self, authority: &Authority) {
        let taken = |holder: &str| {
            let log = self.scenario.directory.path().join(format!("log/{holder}.log"));
            fs::read_to_string(log).unwrap().matches("certificates taken").count()
        };
        let before = DAEMONS.map(|holder| (holder != OPERATOR).then(|| taken(holder)));
        for holder in DAEMONS {
            let directory = self.directory_of(holder);
            let chain = certificates_of(&directory.join("cert.pem")).unwrap();
            let Certificate { common_name, hosts, identity, .. } =
                Certificate::read(&chain[0]).unwrap();
            let request = Request {
                name: common_name,
                kind: identity.kind,
                hosts,
                powers: Some(identity.powers.patterns().map(str::to_owned).collect()),
                ..Request::default()
            };
            let key = fs::read_to_string(directory.join("key.pem")).unwrap();
            let issued = authority.issue_for_key(&request, &key).unwrap();
            replace(&directory.join("cert.pem"), &issued.certificate_pem);
        }
        eventually("the daemons use their other certificates", || {
            let now = DAEMONS.map(|holder| (holder != OPERATOR).then(|| taken(holder)));
            if now.iter().zip(&before).all(|(now, before)| now.is_none() || now > before) {
                Ok(())
            } else {
                Err(format!("{now:?}"))
            }
        });
    }
}

/// Replaces a file in one step.
fn replace(path: &Path, content: &str) {
    let new = path.with_extension("new");
    fs::write(&new, content).unwrap();
    fs::rename(&new, path).unwrap();
}

#[test]
fn a_fleet_renews_its_certificates_whatever_happens_to_its_machines_and_authorities() {
    let mut fleet = Renewing::start();
    let mut server = fleet.scenario.fleet.start_filegen(&fleet.path("config.toml")).unwrap();
    let security = fleet.scenario.fleet.security().clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.spawn(async move { security.reload_until(Default::default()).await });
    fleet.scenario.converge(IMAGE);
    let keys = |fleet: &Renewing| -> Vec<Vec<u8>> {
        fleet.own.iter().map(|own| fs::read(own.join("key.pem")).unwrap()).collect()
    };
    let (first_keys, processes) = (keys(&fleet), processes(&fleet));

    // Two renewals without a restart, and one over kills.
    let before = fleet.serials();
    let before = fleet.renewed(&before);
    let before = fleet.renewed(&before);
    assert_eq!(self::processes(&fleet), processes);
    server.kill().unwrap();
    fleet.scenario.fleet.subs[0].daemon.kill().unwrap();
    server.start_again().unwrap();
    fleet.scenario.fleet.subs[0].daemon.start_again().unwrap();
    fleet.renewed(&before);

    // A machine is off until its certificate has ended.
    fleet.scenario.fleet.subs[1].daemon.stop().unwrap();
    let ended = fleet.certificate(1).unwrap();
    eventually("its certificate has ended", || {
        let end = UNIX_EPOCH + Duration::from_secs(ended.not_after.cast_unsigned() + 1);
        if SystemTime::now() > end { Ok(()) } else { Err("not yet") }
    });
    assert_eq!(fleet.certificate(1).unwrap().serial, ended.serial);
    fleet.scenario.fleet.subs[1].daemon.start_again().unwrap();
    fleet.wait_synced();
    assert_ne!(fleet.certificate(1).unwrap().serial, ended.serial);
    let audits = [
        (fleet.scenario.directory.path().join("dominator/audit"), "replace-certificate"),
        (fleet.scenario.fleet.subs[1].root.join(".subd"), "Subd.ReplaceCertificate"),
    ];
    for (directory, text) in audits {
        assert!(contains(&directory, text), "{text} is not recorded");
    }

    // The authority is replaced: both are trusted, all get other certificates, one is trusted.
    let former = fleet.scenario.fleet.certificates().authority().unwrap().ca_pem().to_owned();
    let options = AuthorityOptions { name: "next fleet".to_owned(), ..Default::default() };
    let next = Authority::create(&options).unwrap();
    let options = AuthorityOptions {
        name: "machines of the next fleet".to_owned(),
        for_machines: true,
        ..Default::default()
    };
    let machines = next.create_intermediate(&options).unwrap();
    let register = Register::create(&fleet.path("ca2"), machines).unwrap();
    // Too early, the second step is refused by the machines, and stopped.
    replace(&fleet.path("ca.pem"), next.ca_pem());
    eventually("the change is stopped", || {
        let words = ["--format", "json", "computed", "list"];
        let (code, out, said) = domtool(&fleet.scenario, &words);
        assert_eq!(code, 0, "{said}");
        let changes: Vec<ContentChange> = serde_json::from_str(&out).unwrap();
        let is_stopped = |one: &ContentChange| matches!(one.stage, ContentStage::Stopped(_));
        if changes.iter().any(is_stopped) { Ok(()) } else { Err(out) }
    });
    fleet.wait_synced();
    for own in &fleet.own {
        assert_eq!(fs::read_to_string(own.join("ca.pem")).unwrap(), former);
    }
    fleet.trust(&format!("{former}{}", next.ca_pem()));
    fleet.certify_daemons(&next);
    fleet.configure("ca2");
    eventually("all machines have certificates of the next authority", || {
        let issuers = (0..3).map(|index| Ok(fleet.certificate(index)?.issuer));
        let issuers = issuers.collect::<Result<Vec<String>, String>>()?;
        if issuers.iter().all(|issuer| *issuer == options.name) {
            Ok(())
        } else {
            Err(format!("{issuers:?}"))
        }
    });
    fleet.wait_synced();
    fleet.trust(next.ca_pem());
    let before = fleet.serials();
    fleet.renewed(&before);
    assert_eq!(keys(&fleet), first_keys);

    // One machine's certificate is revoked: it gets no other one, and the others are renewed.
    let revoked = fleet.certificate(2).unwrap();
    let target = RevocationTarget::from_certificate(&revoked);
    register.lock().unwrap().revoke(&[target], Reason::KeyCompromise).unwrap();
    let list = fs::read_to_string(fleet.path("ca2/crl.pem")).unwrap();
    replace(&fleet.directory_of("dominator").join("crl.pem"), &list);
    let is_cut = |detail: &str| detail.contains("its certificate was revoked");
    fleet.scenario.wait_until("the dominator does not take it for the machine", |subs| {
        subs[2].status == Status::Unreachable && is_cut(&subs[2].detail)
    });
    replace(&fleet.path("crl.pem"), &list);
    let log = fleet.scenario.directory.path().join("log/filegen-server.log");
    eventually("filegen-server makes no certificate for its key", || {
        let said = fs::read_to_string(&log).unwrap();
        let is_refused = |line: &str| line.contains("sub-3: ") && line.contains("was revoked");
        if said.lines().any(is_refused) { Ok(()) } else { Err("it has not refused it") }
    });
    let last = fleet.certificate(2).unwrap().serial;
    let before = fleet.serials();
    eventually("the others are renewed, and know the revocation", || {
        fleet.scenario.fleet.check().unwrap();
        for (index, before) in before.iter().enumerate().take(2) {
            let list_of_machine = fs::read_to_string(fleet.own[index].join("crl.pem")).unwrap();
            let now = fleet.certificate(index)?.serial;
            if now == *before || list_of_machine != list {
                return Err(format!("machine {index} has {now}"));
            }
        }
        Ok(())
    });
    assert_eq!(fleet.certificate(2).unwrap().serial, last);
    drop(server);
}

fn processes(fleet: &Renewing) -> Vec<Option<u32>> {
    fleet.scenario.fleet.subs.iter().map(|sub| sub.daemon.id()).collect()
}
