//! Takes a changed set of configuration and files, once nobody changes it any more.
//!
//! A set that has an error is not taken: the former one stays in force.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::loading::{Stamps, load, stamps};
use super::service::Service;

/// How often the files are looked at.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How long all files must be unchanged before they are taken.
const SETTLING: Duration = Duration::from_secs(2);

/// Asks for the files to be taken as they are; answered when they are, or are found bad.
pub type LoadOrder = oneshot::Sender<()>;

/// The files of a set, and how they change.
#[derive(Debug)]
pub struct Watcher {
    file: PathBuf,
    service: Arc<Service>,
    /// The files as they were when they were read last.
    taken: Stamps,
    /// The files as they are now, if they changed, and since when.
    changed: Option<(Stamps, Duration)>,
}

impl Watcher {
    /// Returns a watcher of the set of `file`, which was read when its files were `taken`.
    #[must_use]
    pub fn new(file: PathBuf, taken: Stamps, service: Arc<Service>) -> Self {
        Self { file, service, taken, changed: None }
    }

    /// Looks at the files, and takes them when that is ordered, until `stop` is cancelled.
    pub async fn run(mut self, mut orders: mpsc::Receiver<LoadOrder>, stop: CancellationToken) {
        let start = tokio::time::Instant::now();
        let follow = async {
            loop {
                let order = tokio::select! {
                    () = tokio::time::sleep(CHECK_INTERVAL) => None,
                    Some(order) = orders.recv() => Some(order),
                };
                let working = tokio::task::spawn_blocking(move || {
                    match order {
                        None => self.check(start.elapsed()),
                        Some(order) => self.take_now(order),
                    }
                    self
                });
                self = match working.await {
                    Ok(watcher) => watcher,
                    Err(error) => {
                        tracing::error!(%error, "changes of the configuration are not seen");
                        return;
                    }
                };
            }
        };
        stop.run_until_cancelled(follow).await;
    }

    fn take_now(&mut self, order: LoadOrder) {
        let (read, set) = load(&self.file);
        (self.taken, self.changed) = (read, None);
        self.service.take(set);
        // Who has ordered it may have gone away.
        let _answered = order.send(());
    }

    /// Reads the set if it changed, and has not changed since [`SETTLING`] before `now`.
    fn check(&mut self, now: Duration) {
        let present = stamps(self.taken.keys());
        if present == self.taken {
            self.changed = None;
            return;
        }
        match &self.changed {
            Some((seen, since)) if *seen == present => {
                if now < *since + SETTLING {
                    return;
                }
            }
            _ => {
                self.changed = Some((present, now));
                return;
            }
        }
        let (read, set) = load(&self.file);
        let knows_all = read.keys().all(|path| present.contains_key(path));
        if !knows_all || stamps(read.keys()) != read {
            // A file that is new to the set may still be changing. `taken` has it with a stamp
            // that no file has, so that the set is read again.
            self.taken = read.keys().map(|path| (path.clone(), None)).collect();
            self.changed = Some((stamps(read.keys()), now));
            return;
        }
        (self.taken, self.changed) = (read, None);
        self.service.take(set);
    }
}
