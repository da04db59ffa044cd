//! Reads a source repeatedly and sends what it delivers.

pub mod file;

use std::time::Duration;

use daemon::program::{CommandError, output};
use model::backoff::{doubled, jittered};
use model::display::error_chain;
use system::random::random;
use tokio::sync::mpsc;
use web::{WebAddress, WebClient, WebError};

use super::core::settings::{Origin, Source};
use super::storage::DATA_BYTES_MAX;
use file::{File, FileError};

/// Pause after the first failed reading, before jitter.
const RETRY_FIRST: Duration = Duration::from_secs(1);

/// How web servers are asked.
const WEB: WebClient =
    WebClient { agent: concat!("mdbd/", env!("CARGO_PKG_VERSION")), bytes_max: DATA_BYTES_MAX };

/// The result of reading a source.
#[derive(Debug)]
pub struct Delivery {
    /// Number of the source, from 0.
    pub index: usize,
    /// The data, or an error message.
    pub data: Result<Vec<u8>, String>,
}

/// A failed reading.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    File(FileError),
    #[error(transparent)]
    Web(WebError),
    #[error(transparent)]
    Command(CommandError),
    #[error("not done within {} s", .0.as_secs())]
    TimedOut(Duration),
}

/// Reads `source`, number `index`, every `interval`, 20 % more or less; sooner after a failure, and
/// a file as soon as it changes. Ends when the receiver is dropped.
pub async fn follow(
    index: usize,
    source: Source,
    interval: Duration,
    deliveries: mpsc::Sender<Delivery>,
) {
    let mut reader = Reader::new(source.origin);
    let mut failures = 0;
    loop {
        let limit = source.timeout;
        let read = tokio::time::timeout(limit, reader.read()).await;
        let data = read.unwrap_or(Err(ReadError::TimedOut(limit)));
        let data = data.map_err(|error| error_chain(&error));
        let pause = if data.is_ok() {
            failures = 0;
            interval
        } else {
            failures += 1;
            doubled(RETRY_FIRST, interval, failures)
        };
        if deliveries.send(Delivery { index, data }).await.is_err() {
            return;
        }
        let jitter = u16::try_from(random() % 1_000).unwrap_or_default();
        let _due = tokio::time::timeout(jittered(pause, jitter), reader.changed()).await;
    }
}

enum Reader {
    File(File),
    Web(WebAddress),
    Command(Vec<String>),
}

impl Reader {
    fn new(origin: Origin) -> Self {
        match origin {
            Origin::File(path) => Self::File(File::new(path)),
            Origin::Web(address) => Self::Web(address),
            Origin::Command(line) => Self::Command(line),
        }
    }

    async fn read(&mut self) -> Result<Vec<u8>, ReadError> {
        match self {
            Self::File(file) => file.read().await.map_err(ReadError::File),
            Self::Web(address) => WEB.get(address).await.map_err(ReadError::Web),
            Self::Command(line) => {
                output(line, b"", DATA_BYTES_MAX).await.map_err(ReadError::Command)
            }
        }
    }

    /// Waits until a file changes; for other sources forever.
    async fn changed(&self) {
        match self {
            Self::File(file) => file.changed().await,
            Self::Web(_) | Self::Command(_) => std::future::pending().await,
        }
    }
}
