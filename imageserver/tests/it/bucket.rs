//! A store in a bucket: a real S3 server, moto, on loopback.
//!
//! `.ci/run` installs it in a directory of its own; `MOTO_SERVER` names the program. By hand:
//! `python3 -m venv /opt/moto && /opt/moto/bin/pip install 'moto[server]==5.2.5'`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use imageserver::store::Store;
use imageserver::store::bucket::keys;
use imageserver::store::bucket::settings::BucketSettings;
use model::object::ObjectId;

use crate::fixture::{ALGORITHM, name};
use crate::suite::{Place, make_directory};

/// Ends the server when nobody holds the other end of its standard input any more, however the
/// tests end.
const LEASH: &str = r#""$0" "$@" </dev/null & read -r line; kill "$!"; wait "$!""#;

/// A moto server of a test. It ends when this is dropped, or the tests do.
pub struct Moto {
    leash: Child,
    pub address: SocketAddr,
}

impl Moto {
    pub fn start() -> Self {
        let program = std::env::var("MOTO_SERVER").unwrap_or_else(|_| "moto_server".to_owned());
        // It cannot choose a port and say which: one that was free a moment ago is tried.
        for _ in 0..20 {
            let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let port = address.port().to_string();
            let mut leash = Command::new("sh")
                .args(["-c", LEASH, &program, "-H", "127.0.0.1", "-p", &port])
                .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/moto"))
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(leash.stderr.take().unwrap()).lines();
            let runs = lines.by_ref().map_while(Result::ok).any(|line| line.contains("Running on"));
            if runs {
                std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
                return Self { leash, address };
            }
            drop(leash.stdin.take());
            let _reaped = leash.wait();
        }
        panic!("{program} does not start: see the head of tests/it/bucket.rs");
    }

    /// One request over HTTP; the status and the body.
    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // It believes whatever signature is shown.
        let credential = "Credential=test/20260101/us-east-1/s3/aws4_request";
        let signed = format!("AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: {signed}\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let status = std::str::from_utf8(&answer[9..12]).unwrap().parse().unwrap();
        (status, answer[end + 4..].to_vec())
    }

    /// Makes a bucket.
    pub fn make_bucket(&self, bucket: &str) {
        let (status, body) = self.request("PUT", &format!("/{bucket}"), b"");
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    }

    pub fn put(&self, bucket: &str, key: &str, body: &[u8]) {
        let (status, answer) = self.request("PUT", &format!("/{bucket}/{key}"), body);
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&answer));
    }

    pub fn get(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let (status, body) = self.request("GET", &format!("/{bucket}/{key}"), b"");
        (status == 200).then_some(body)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        drop(self.leash.stdin.take());
        let _reaped = self.leash.wait();
    }
}

/// Instead of a status: no answer at all.
pub const SILENCE: &str = "";

/// Stands in front of a bucket, and answers for it as often as it is told.
pub struct Gate {
    pub address: SocketAddr,
    /// The status to answer with, or [`SILENCE`], and how often.
    answers: Arc<Mutex<(&'static str, u32)>>,
}

impl Gate {
    /// Before `bucket`. Its threads end with the tests.
    pub fn before(bucket: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Arc::<Mutex<(&'static str, u32)>>::default();
        let told = Arc::clone(&answers);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let told = Arc::clone(&told);
                std::thread::spawn(move || Self::serve(near.unwrap(), bucket, &told));
            }
        });
        Self { address, answers }
    }

    /// Answers the next `times` requests with `status`.
    pub fn answer(&self, status: &'static str, times: u32) {
        *self.answers.lock().unwrap() = (status, times);
    }

    /// Each connection is of one request: the server says that it closes it.
    fn serve(mut near: TcpStream, bucket: SocketAddr, told: &Mutex<(&'static str, u32)>) {
        let status = {
            let mut told = told.lock().unwrap();
            if told.1 > 0 { Some(told.0) } else { None }.inspect(|_| told.1 -= 1)
        };
        let mut first = vec![0; 64 << 10];
        let Ok(length @ 1..) = near.read(&mut first) else { return };
        if let Some(status) = status {
            if status == SILENCE {
                while near.read(&mut first).is_ok_and(|length| length > 0) {}
                return;
            }
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            // The other side may have gone.
            let _sent = near.write_all(answer.as_bytes());
            let _rest = near.shutdown(std::net::Shutdown::Write);
            while near.read(&mut first).is_ok_and(|length| length > 0) {}
            return;
        }
        let mut far = TcpStream::connect(bucket).unwrap();
        far.write_all(&first[..length]).unwrap();
        let (mut from_near, mut to_far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from_near, &mut to_far));
        let _copied = std::io::copy(&mut far, &mut near);
        let _closed = near.shutdown(std::net::Shutdown::Both);
    }
}

/// The one that all places share, each with a bucket of its own.
fn shared() -> &'static Moto {
    static MOTO: OnceLock<Moto> = OnceLock::new();
    MOTO.get_or_init(Moto::start)
}

/// A bucket, and what is one server's own.
pub struct Bucket {
    moto: &'static Moto,
    settings: BucketSettings,
    data: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

impl Bucket {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let moto = shared();
        let bucket = format!("images-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        moto.make_bucket(&bucket);
        let data = tempfile::tempdir().unwrap();
        let settings = settings(moto, &bucket, data.path().join("credentials"));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { moto, settings, data, runtime: runtime.unwrap() }
    }

    /// Another server on the same bucket.
    pub fn open_beside(&self, data: &str) -> Arc<Store> {
        let data = self.data.path().join(data);
        let runtime = self.runtime.handle().clone();
        Arc::new(Store::open_bucket(&data, &self.settings, runtime).unwrap())
    }

    fn key(&self, below: &str) -> String {
        // As it is written in an address.
        format!("prod/{below}").replace('=', "%3D")
    }
}

/// What a server is told of a bucket, whose credentials are written to a file.
pub fn settings(moto: &Moto, bucket: &str, credentials: PathBuf) -> BucketSettings {
    std::fs::write(&credentials, "aws_access_key_id = test\naws_secret_access_key = test\n")
        .unwrap();
    BucketSettings {
        bucket: bucket.to_owned(),
        prefix: "prod".to_owned(),
        endpoint: Some(format!("http://{}", moto.address)),
        region: Some("us-east-1".to_owned()),
        credentials: Some(credentials),
        authorities: None,
        unneeded_for: Duration::ZERO,
        cache_bytes_max: 100_000_000,
    }
}

impl Place for Bucket {
    fn open(&self) -> Arc<Store> {
        self.open_beside("data")
    }

    fn spoil(&self, id: &ObjectId) {
        let key = self.key(&keys::object(id));
        let mut content = self.moto.get(&self.settings.bucket, &key).unwrap();
        let middle = content.len() / 2;
        content[middle] ^= 1;
        self.moto.put(&self.settings.bucket, &key, &content);
        // What was kept is good, and would be served.
        let cached = self.data.path().join("data/objects");
        if cached.exists() {
            std::fs::remove_file(cached.join(imageserver::store::layout::object_path(id))).unwrap();
        }
    }

    fn spoil_record(&self, image: &str) {
        let key = self.key(&keys::image(&name(image)).unwrap());
        self.moto.put(&self.settings.bucket, &key, b"no record\n");
    }
}

/// So many that they are looked for in lists.
#[test]
fn of_thousands_it_is_known_which_are_there() {
    let place = Bucket::new();
    let store = place.open();
    let content = |number: u32| number.to_le_bytes();
    let ids: Vec<ObjectId> = (0..2_500).map(|number| ALGORITHM.digest(&content(number))).collect();
    let stored: Vec<u32> = (0..2_500).step_by(250).collect();
    for number in &stored {
        let mut receiving = store.objects.receive(ids[*number as usize], 4).unwrap();
        receiving.write(&content(*number)).unwrap();
        receiving.finish().unwrap().wait().unwrap();
    }
    let held = store.objects.all_held(&ids).unwrap();
    let found: Vec<u32> = (0..2_500).filter(|&number| held[number as usize].is_some()).collect();
    assert_eq!(found, stored);
    assert!(held.iter().flatten().all(|&size_bytes| size_bytes == 4));
}

#[test]
fn directories_that_several_servers_make_are_all_there() {
    let place = Bucket::new();
    let (one, two) = (place.open(), place.open_beside("other"));
    make_directory(&one, "web");
    make_directory(&two, "db");
    make_directory(&one, "web/edge");
    two.directories.refresh().unwrap();
    assert_eq!(one.directories.now(), two.directories.now());
    let known = |directory: &str| one.directories.now().is_there(&name(directory), |_| false);
    assert!(known("web") && known("db") && known("web/edge") && !known("x"));
}
