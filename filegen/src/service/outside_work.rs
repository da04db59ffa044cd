//! Files that programs and web servers make: each is asked once for a file, however many requests
//! wait for it.

use std::sync::Arc;
use std::time::Duration;

use api::file_generator::{GeneratedContent, GeneratedFile};
use model::lock::locked;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::Service;
use crate::core::contents::Content;
use crate::core::results::{Known, ResultKey};
use crate::generators::{LoadedGenerator, Maker};
use crate::outside::{Answer, ask};

/// How long a request waits for programs and web servers. Callers wait 30 s.
const OUTSIDE_WAIT: Duration = Duration::from_secs(20);

/// A file that was made outside, or why it was not.
type Made = Result<GeneratedContent, String>;

/// Tells those that wait for a program or web server what became of it.
pub(super) type Work = watch::Receiver<Option<Made>>;

/// A file that a request waits for.
pub(super) struct Pending {
    /// The index of the machine in the request, and of the path.
    pub(super) at: (usize, usize),
    pub(super) key: ResultKey,
    pub(super) generator: Arc<LoadedGenerator>,
    pub(super) hostname: Arc<str>,
    pub(super) record: Arc<[u8]>,
}

/// A file that is being made outside. Its result is taken when this is dropped, also after a panic.
struct Making {
    service: Arc<Service>,
    key: ResultKey,
    generator: Arc<LoadedGenerator>,
    hostname: Arc<str>,
    made: Made,
    done: watch::Sender<Option<Made>>,
}

impl Making {
    fn keep(&self, answer: Answer) -> Made {
        let content = self.generator.check(Content::new(answer.bytes))?;
        let until = match answer.seconds_valid {
            0 => 0,
            seconds => self.service.now().wall_seconds.saturating_add(seconds),
        };
        let algorithm = self.key.algorithm;
        Ok(self.service.keep(&self.generator, &content, algorithm, &self.hostname, until))
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        let (service, path) = (&self.service, &self.generator.definition.path);
        match &self.made {
            Ok(_) => service.count(path, 1, 0, String::new()),
            Err(why) => service.count(path, 0, 1, format!("{}: {why}", self.hostname)),
        }
        locked(&service.results).finish(self.key, self.made.clone(), service.now());
        self.done.send_replace(Some(self.made.clone()));
    }
}

impl Service {
    /// Waits for what is made outside, and fills it in.
    pub(super) async fn wait_outside(
        self: &Arc<Self>,
        machines: &mut [Vec<GeneratedFile>],
        pending: Vec<Pending>,
    ) {
        let deadline = Instant::now() + OUTSIDE_WAIT;
        let mut waiting = Vec::new();
        for one in pending {
            match self.ask_outside(&one) {
                Err(work) => waiting.push((one.at, work)),
                Ok(file) => machines[one.at.0][one.at.1] = file,
            }
        }
        for (at, mut work) in waiting {
            let _late = timeout_at(deadline, work.wait_for(Option::is_some)).await.map(drop);
            // What ended while others were waited for is given, too: if it were made again, what is
            // valid for less than a round would never be given.
            if let Some(made) = work.borrow().clone() {
                machines[at.0][at.1] = made.map_or_else(GeneratedFile::Failed, GeneratedFile::Made);
            }
        }
    }

    /// Returns a file that is made outside, or what to wait for.
    fn ask_outside(self: &Arc<Self>, one: &Pending) -> Result<GeneratedFile, Work> {
        loop {
            let mut started = None;
            let known = locked(&self.results).ask(one.key, self.now(), || {
                let (sender, work) = watch::channel(None);
                started = Some((sender, work.clone()));
                work
            });
            match (known, started) {
                (Known::Made(made), _) => {
                    let mut contents = locked(&self.contents);
                    let is_kept = if made.is_secret {
                        contents.get_secret(made.id, [&*one.hostname]).is_some()
                    } else {
                        contents.get(made.id).is_some()
                    };
                    if is_kept {
                        return Ok(GeneratedFile::Made(made));
                    }
                    locked(&self.results).forget(&one.key);
                }
                (Known::Failed(why), _) => return Ok(GeneratedFile::Failed(why)),
                (Known::Running(work), _) => return Err(work),
                (Known::Start, started) => {
                    let (sender, work) = started.expect("it was started");
                    let (generator, record) = (Arc::clone(&one.generator), Arc::clone(&one.record));
                    let asked = async move { answer(&generator, &record).await };
                    self.run_outside(one, sender, asked);
                    return Err(work);
                }
            }
        }
    }

    /// Has a file made outside, in a task of its own: what a caller no longer waits for is of use
    /// to the next one.
    fn run_outside(
        self: &Arc<Self>,
        one: &Pending,
        done: watch::Sender<Option<Made>>,
        asked: impl Future<Output = Result<Answer, String>> + Send + 'static,
    ) {
        let mut making = Making {
            service: Arc::clone(self),
            key: one.key,
            generator: Arc::clone(&one.generator),
            hostname: Arc::clone(&one.hostname),
            made: Err("filegen-server failed while it was made: see its log".to_owned()),
            done,
        };
        self.tasks.spawn(async move {
            let answer = match making.service.stop.run_until_cancelled(asked).await {
                None => Err("filegen-server is stopping".to_owned()),
                Some(answer) => answer,
            };
            making.made = answer.and_then(|answer| making.keep(answer));
            drop(making);
        });
    }
}

/// Asks a program or web server, when it may be asked.
async fn answer(generator: &LoadedGenerator, record: &[u8]) -> Result<Answer, String> {
    let Maker::Outside(outside, permits) = &generator.maker else {
        return Err("it is not made outside".to_owned());
    };
    let _permit = permits.acquire().await.map_err(|error| error.to_string())?;
    let path = &generator.definition.path;
    match ask(outside, path, record).await {
        Ok(answer) => Ok(answer),
        Err(error) => {
            if let Some(complaint) = error.complaint().filter(|_| !generator.definition.is_secret) {
                tracing::warn!(%path, "the program says: {complaint}");
            }
            Err(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use certs::pairs::PairStore;
    use model::object::Algorithm;
    use model::path::TreePath;
    use rpc::audit_log::AuditLog;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::core::settings::{Definition, Kind};
    use crate::generators::GeneratorSet;
    use crate::revisions::Revisions;
    use crate::service::Stores;

    #[tokio::test]
    async fn a_panic_ends_what_is_waited_for() {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let set = GeneratorSet::default();
        let directory = tempfile::tempdir().unwrap();
        let pairs = PairStore::open(directory.path()).unwrap();
        let kept = Stores { pairs, revisions: Revisions::open(directory.path()), signer: None };
        let service = Service::new(set, 1 << 20, kept, AuditLog::none(), tasks, stop).unwrap();
        let digest = Algorithm::Blake3.digest(b"");
        let definition = Definition {
            path: TreePath::new("/key").unwrap(),
            kind: Kind::Mdb,
            is_secret: false,
            allow_empty: false,
            line: 1,
        };
        let generator = LoadedGenerator { definition, maker: Maker::Mdb, version: digest };
        let one = Pending {
            at: (0, 0),
            key: ResultKey { generator: digest, record: digest, algorithm: Algorithm::Blake3 },
            generator: Arc::new(generator),
            hostname: "web1".into(),
            record: Arc::default(),
        };
        let (done, work) = watch::channel(None);
        let known = locked(&service.results).ask(one.key, service.now(), || work);
        assert!(matches!(known, Known::Start));
        service.run_outside(&one, done, async { panic!("a mistake") });
        let mut machines = vec![vec![GeneratedFile::Failed("it waits".to_owned())]];
        service.wait_outside(&mut machines, vec![one]).await;
        let why = "filegen-server failed while it was made: see its log".to_owned();
        assert_eq!(machines, [[GeneratedFile::Failed(why)]]);
        assert_eq!(service.statistics().values().next().unwrap().failures, 1);
    }
}
