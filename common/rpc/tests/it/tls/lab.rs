//! Authorities and certificates of every kind, good and bad, and a server to try them on.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CustomExtension, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use tempfile::TempDir;

/// An authority, with its key.
pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
    /// What stands between it and the root, from itself on.
    between: String,
}

/// What a certificate is to say.
#[derive(Clone, Default)]
pub struct Wanted<'a> {
    pub name: &'a str,
    pub hosts: &'a [&'a str],
    /// `None` for a certificate without the extension.
    pub powers: Option<&'a [&'a str]>,
    pub groups: &'a [&'a str],
    pub serial: u8,
    pub has_ended: bool,
    pub is_machine: bool,
    pub is_future: bool,
}

fn params(name: &str, hosts: &[&str]) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    params
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = params(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// A sequence of UTF-8 strings, in DER.
fn strings(texts: &[&str]) -> Vec<u8> {
    let inner: Vec<u8> = texts
        .iter()
        .flat_map(|text| [&[0x0c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat())
        .collect();
    [&[0x30, u8::try_from(inner.len()).unwrap()], &inner[..]].concat()
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let (params, key) = (authority_params(name), KeyPair::generate().unwrap());
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key), between: String::new() }
    }

    /// An authority that this one vouches for.
    pub fn intermediate(&self, name: &str) -> Self {
        let (params, key) = (authority_params(name), KeyPair::generate().unwrap());
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        let between = format!("{pem}{}", self.between);
        Self { pem, issuer: Issuer::new(params, key), between }
    }

    /// Writes `cert.pem`, `key.pem` and `ca.pem` of `trusted` into `dir`.
    pub fn issue(&self, dir: &Path, wanted: &Wanted<'_>, trusted: &[&Authority]) {
        let mut params = params(wanted.name, wanted.hosts);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(SerialNumber::from_slice(&[1, wanted.serial]));
        if wanted.has_ended {
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        if wanted.is_future {
            params.not_before = date_time_ymd(2099, 1, 1);
        }
        let lists = [(1, wanted.powers), (2, Some(wanted.groups).filter(|all| !all.is_empty()))];
        for (kind, texts) in lists {
            let Some(texts) = texts else { continue };
            let oid = [1, 3, 6, 1, 4, 1, 9586, 100, 7, kind];
            params.custom_extensions.push(CustomExtension::from_oid_content(&oid, strings(texts)));
        }
        if wanted.is_machine {
            let oid = [1, 3, 6, 1, 4, 1, 9586, 100, 7, 3];
            let kind = [&[0x0c, 7], &b"machine"[..]].concat();
            params.custom_extensions.push(CustomExtension::from_oid_content(&oid, kind));
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        fs::create_dir_all(dir).unwrap();
        let authorities: String = trusted.iter().map(|one| one.pem.as_str()).collect();
        fs::write(dir.join("ca.pem"), authorities).unwrap();
        fs::write(dir.join("cert.pem"), format!("{certificate}{}", self.between)).unwrap();
        write_key(dir, &key.serialize_pem());
    }

    /// The list of what it has revoked.
    pub fn revoked(&self, serials: &[u8], number: u8) -> String {
        let revoked_certs = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&[1, *serial]),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from_slice(&[number]),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

pub fn write_key(dir: &Path, pem: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let path = dir.join("key.pem");
    fs::write(&path, pem).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// An authority, and a directory in which there are certificates.
pub struct Lab {
    pub authority: Authority,
    place: TempDir,
}

impl Lab {
    pub fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let lab = Self { authority: Authority::new("fleet"), place };
        let hosts = &["testd.example.org", "127.0.0.1"];
        lab.issue("server", &Wanted { name: "testd", hosts, ..Wanted::default() });
        lab
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub fn issue(&self, dir: &str, wanted: &Wanted<'_>) -> PathBuf {
        self.authority.issue(&self.dir(dir), wanted, &[&self.authority]);
        self.dir(dir)
    }

    pub fn open(&self, name: &str) -> Security {
        Security::open(&self.dir(name)).unwrap()
    }

    /// A client with the certificate in `dir`, of the server that is at `address`.
    pub fn client(&self, dir: &str, address: SocketAddr) -> Client {
        Client::new(peer(address), &self.open(dir))
    }
}

/// The server at `address`, by its name.
pub fn peer(address: SocketAddr) -> Peer {
    let peer = Peer::parse("testd.example.org", address.port()).unwrap();
    peer.at(Some(address.ip()))
}
