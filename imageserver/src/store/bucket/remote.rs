//! Requests to the bucket: retries, time limits and errors.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::stream::{Stream, StreamExt as _, TryStreamExt as _};
use model::lock::locked;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, Error, GetResult, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMode, PutOptions, RetryConfig, UpdateVersion,
};
use system::clock::wall;
use system::random::random_bytes;
use tokio::runtime::Handle;

use super::keys;
use super::settings::{BucketSettings, credentials};
use crate::store::bucket::removal_rules::Clocks;
use crate::store::bucket_error::BucketError;
use crate::store::error::{StoreError, failed};

/// The longest time to connect, and the longest time without data from the bucket. A request that
/// got no answer is repeated once, because a connection that was idle may have been lost; callers
/// of this server wait for 30 s, and are to be told why before.
const SILENCE_MAX: Duration = Duration::from_secs(13);

/// How long a failed request is retried: no try begins later.
const RETRY_TIMEOUT: Duration = Duration::from_secs(14);

/// The most retries of a request.
const RETRIES_MAX: usize = 6;

/// The longest that a removal may take, tries included.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// How many requests of one kind are under way at once.
pub const REQUESTS_MAX: usize = 64;

/// The content of a key.
pub struct Entry {
    pub bytes: Vec<u8>,
    /// The tag of this version.
    pub etag: String,
    /// The date in the bucket, in seconds since 1970.
    pub modified: i64,
}

/// The metadata of a key.
#[derive(Clone, Debug)]
pub struct Meta {
    pub key: Path,
    pub etag: String,
    pub modified: i64,
    /// The length, in bytes.
    pub size_bytes: u64,
}

/// The bucket, as threads see it that may block.
pub struct Remote {
    store: Arc<AmazonS3>,
    runtime: Handle,
    bucket: String,
    prefix: Path,
    server: String,
    /// The last reading of the bucket's clock, and when it was made.
    time: Mutex<Option<(i64, Instant)>>,
}

/// Returns 128 random bits as hexadecimal digits.
pub fn nonce() -> String {
    format!("{:032x}", u128::from_le_bytes(random_bytes()))
}

impl Remote {
    /// Connects to the bucket of `settings` as `server`. Sends nothing yet.
    pub fn new(
        settings: &BucketSettings,
        server: String,
        runtime: Handle,
    ) -> Result<Self, StoreError> {
        let unfit = |source| unfit(settings, source);
        // Another part of the program may have installed the same provider before.
        let _done = rustls::crypto::ring::default_provider().install_default();
        let mut client = ClientOptions::new()
            .with_timeout_disabled()
            .with_connect_timeout(SILENCE_MAX)
            .with_read_timeout(SILENCE_MAX)
            .with_pool_max_idle_per_host(REQUESTS_MAX);
        let is_plain =
            settings.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
        client = client.with_allow_http(is_plain);
        if let Some(path) = &settings.authorities {
            let pem = fs_err::read(path).map_err(failed("read the authorities of the bucket"))?;
            for certificate in Certificate::from_pem_bundle(&pem).map_err(unfit)? {
                client = client.with_root_certificate(certificate);
            }
        }
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: RETRIES_MAX,
            retry_timeout: RETRY_TIMEOUT,
        };
        let mut builder = AmazonS3Builder::from_env();
        if let Some(path) = settings.credentials_file() {
            let text = fs_err::read_to_string(&path)
                .map_err(failed("read the credentials of the bucket"))?;
            let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
            let found = credentials(&text, &profile).ok_or_else(|| StoreError::Credentials {
                path: path.clone(),
                profile: profile.clone(),
            })?;
            builder = builder.with_access_key_id(found.key_id);
            builder = builder.with_secret_access_key(found.secret);
            if let Some(token) = found.token {
                builder = builder.with_token(token);
            }
        }
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &settings.region {
            builder = builder.with_region(region);
        }
        let store = builder
            .with_bucket_name(&settings.bucket)
            .with_client_options(client)
            .with_retry(retry)
            .with_checksum_algorithm(Checksum::SHA256)
            .build()
            .map_err(unfit)?;
        let prefix = Path::from(settings.prefix.as_str());
        let bucket = format!("s3://{}/{}", settings.bucket, settings.prefix);
        let bucket = bucket.trim_end_matches('/').to_owned();
        let time = Mutex::default();
        Ok(Self { store: Arc::new(store), runtime, bucket, prefix, server, time })
    }

    /// The name of this server in the bucket.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// A key below the prefix.
    pub fn key(&self, below: &str) -> Path {
        below.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// Returns the part of `key` after `below`; `None` if it is not below.
    pub fn below<'key>(&self, key: &'key Path, below: &str) -> Option<&'key str> {
        let start = self.key(below);
        key.as_ref().strip_prefix(start.as_ref())?.strip_prefix('/')
    }

    /// Runs requests. The calling thread waits.
    pub fn wait<F: Future>(&self, requests: F) -> F::Output {
        self.runtime.block_on(requests)
    }

    /// The runtime of the requests.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The library's own.
    pub fn store(&self) -> &Arc<AmazonS3> {
        &self.store
    }

    /// Returns the error that the bucket cannot be used.
    pub fn unfit(&self, why: &'static str) -> StoreError {
        let source = BucketError::Unfit { bucket: self.bucket.clone(), why };
        StoreError::Bucket { what: "open the store".to_owned(), source }
    }

    /// Returns a conversion of errors of requests to `what`.
    pub fn failed(&self, what: impl Into<String>) -> impl FnOnce(Error) -> StoreError {
        let bucket = self.bucket.clone();
        move |source| {
            let what = what.into();
            StoreError::Bucket { what, source: BucketError::new(bucket, &source) }
        }
    }

    /// Reads `key`. Fails if it is longer than `bytes_max`.
    pub fn get(&self, key: &Path, bytes_max: u64) -> Result<Option<Entry>, StoreError> {
        self.wait(self.get_async(key, bytes_max))
    }

    /// Does the same as [`Remote::get`].
    pub async fn get_async(&self, key: &Path, bytes_max: u64) -> Result<Option<Entry>, StoreError> {
        let what = || format!("read {key}");
        let found: GetResult = match self.store.get(key).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed(what())(error)),
        };
        if found.meta.size > bytes_max {
            return Err(self.unfit("a key is longer than any server writes it"));
        }
        let etag = found.meta.e_tag.clone().unwrap_or_default();
        let modified = found.meta.last_modified.timestamp();
        let bytes = found.bytes().await.map_err(self.failed(what()))?.into();
        Ok(Some(Entry { bytes, etag, modified }))
    }

    /// Reads the metadata of `key`.
    pub fn head(&self, key: &Path) -> Result<Option<Meta>, StoreError> {
        self.wait(self.head_async(key))
    }

    /// Does the same as [`Remote::head`].
    pub async fn head_async(&self, key: &Path) -> Result<Option<Meta>, StoreError> {
        match self.store.head(key).await {
            Ok(found) => Ok(Some(meta(found))),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(format!("look for {key}"))(error)),
        }
    }

    /// Writes `key`, whatever is there.
    pub fn put(&self, key: &Path, bytes: Vec<u8>) -> Result<(), StoreError> {
        let done = self.wait(self.store.put(key, bytes.into()));
        done.map(drop).map_err(self.failed(format!("write {key}")))
    }

    /// Writes `key` if nothing is there, and gives its new tag; `None` if something is.
    pub fn create(&self, key: &Path, bytes: Vec<u8>) -> Result<Option<String>, StoreError> {
        self.write(key, bytes, PutMode::Create)
    }

    /// Writes `key` if it has that tag, and gives its new one; `None` if it has another.
    pub fn update(
        &self,
        key: &Path,
        bytes: Vec<u8>,
        etag: &str,
    ) -> Result<Option<String>, StoreError> {
        let version = UpdateVersion { e_tag: Some(etag.to_owned()), version: None };
        self.write(key, bytes, PutMode::Update(version))
    }

    fn write(
        &self,
        key: &Path,
        bytes: Vec<u8>,
        mode: PutMode,
    ) -> Result<Option<String>, StoreError> {
        let length = bytes.len() as u64;
        let options = PutOptions { mode, ..PutOptions::default() };
        let sent = bytes.clone();
        match self.wait(self.store.put_opts(key, bytes.into(), options)) {
            Ok(done) => Ok(Some(done.e_tag.unwrap_or_default())),
            // An answer that was lost makes the library ask again: then it is our own that is in
            // the way.
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                match self.head(key)? {
                    Some(found) if found.size_bytes == length => {
                        let there = self.get(key, length)?;
                        Ok(there.filter(|entry| entry.bytes == sent).map(|entry| entry.etag))
                    }
                    _ => Ok(None),
                }
            }
            Err(error) => Err(self.failed(format!("write {key}"))(error)),
        }
    }

    /// Removes keys. When this returns, with an error too, no request of it is tried again.
    pub fn delete(&self, keys: &[Path]) -> Result<(), StoreError> {
        let keys: Vec<Result<Path, Error>> = keys.iter().cloned().map(Ok).collect();
        let stream = self.store.delete_stream(futures_util::stream::iter(keys).boxed());
        let removal = async {
            let done =
                tokio::time::timeout(REMOVAL_TIMEOUT, stream.try_for_each(|_| async { Ok(()) }));
            done.await
        };
        match self.wait(removal) {
            Ok(Ok(()) | Err(Error::NotFound { .. })) => Ok(()),
            Ok(Err(error)) => Err(self.failed("remove keys")(error)),
            Err(_) => Err(StoreError::Slow { what: "remove keys".to_owned() }),
        }
    }

    /// Lists all keys below `below`, in order.
    pub fn list_async(
        &self,
        below: &str,
    ) -> impl Stream<Item = Result<Meta, StoreError>> + Unpin + use<> {
        let prefix = self.key(below);
        let bucket = self.bucket.clone();
        let listed = self.store.list(Some(&prefix));
        listed.map(move |found| {
            found.map(meta).map_err(|error| StoreError::Bucket {
                what: format!("list {prefix}"),
                source: BucketError::new(bucket.clone(), &error),
            })
        })
    }

    /// Calls `take` with all keys below `below`, in order, until it returns false.
    pub fn list(&self, below: &str, take: &mut dyn FnMut(Meta) -> bool) -> Result<(), StoreError> {
        let mut stream = self.list_async(below);
        while let Some(found) = self.wait(stream.next()) {
            if !take(found?) {
                break;
            }
        }
        Ok(())
    }

    /// Reads the bucket's clock.
    pub fn tell_time(&self) -> Result<Clocks, StoreError> {
        let key = self.key(&keys::clock(&self.server));
        self.put(&key, nonce().into_bytes())?;
        let Some(found) = self.head(&key)? else {
            return Err(self.unfit("a key that was just written is not there"));
        };
        *locked(&self.time) = Some((found.modified, Instant::now()));
        Ok(Clocks { bucket: found.modified, server: wall().seconds })
    }

    /// Returns the time, by the last reading of the bucket's clock.
    pub fn now(&self) -> Clocks {
        let server = wall().seconds;
        let told = *locked(&self.time);
        let bucket = told.map_or(server, |(time, at)| {
            time.saturating_add(i64::try_from(at.elapsed().as_secs()).unwrap_or(i64::MAX))
        });
        Clocks { bucket, server }
    }
}

fn meta(found: ObjectMeta) -> Meta {
    Meta {
        etag: found.e_tag.unwrap_or_default(),
        modified: found.last_modified.timestamp(),
        size_bytes: found.size,
        key: found.location,
    }
}

fn unfit(settings: &BucketSettings, source: Error) -> StoreError {
    let bucket = format!("s3://{}", settings.bucket);
    let what = "open the store".to_owned();
    StoreError::Bucket { what, source: BucketError::new(bucket, &source) }
}
