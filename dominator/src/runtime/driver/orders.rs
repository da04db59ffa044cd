//! Carries out what operators order of one machine.

use std::time::Duration;

use api::subd::{Poll, PollReply, PollRequest, ScanNow, ScanNowRequest, Version};
use rpc::client::{CallError, Client};

use super::{ACCEPT_LIMIT, Handle, Shared, failure_of};
use crate::core::sub::{Event, Failure, FailureKind, Sub, SubOrder, Ticket};

/// How often counters are looked at, which are no news by themselves.
const COUNTER_LOOK: Duration = Duration::from_millis(100);

/// How long a scan at once may take.
const SCAN_LIMIT: Duration = Duration::from_secs(300);

impl Handle {
    /// Gives an operator's order to the state machine; true if it was of use. The driver carries
    /// out what follows from it.
    pub fn order(&self, order: SubOrder, shared: &Shared) -> bool {
        let answer = self.step(Event::Ordered(order), shared).answer;
        self.nudge.notify_one();
        answer.unwrap_or_default()
    }

    /// Waits until what is told to those who watch is of another version.
    pub async fn news(&self, have: u64) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // What happens from here on is not missed.
            news.as_mut().enable();
            if self.look(Sub::watched_version) != have {
                return;
            }
            news.await;
        }
    }
}

/// Has the sub look at its whole tree, and waits until it has.
pub(super) async fn scan(client: Client, ticket: Ticket, have: Version) -> Event {
    let result = match tokio::time::timeout(SCAN_LIMIT, scan_twice(&client, have)).await {
        Ok(result) => result.map_err(|error| failure_of(&error)),
        Err(_) => {
            let text = format!("no pass over the tree has ended within {SCAN_LIMIT:?}");
            Err(Failure { kind: FailureKind::Busy, text })
        }
    };
    Event::Scanned(ticket, result)
}

/// The end of the first pass may be that of one which had begun before; that of the second is not.
async fn scan_twice(client: &Client, have: Version) -> Result<Version, CallError> {
    let mut last = look(client, have).await?;
    for _pass in 0..2 {
        let before = last.counters.metadata_passes;
        let instance = last.version.instance;
        let request = ScanNowRequest { content: false, media: false };
        client.call_within::<ScanNow>(&request, ACCEPT_LIMIT).await?;
        loop {
            last = look(client, last.version).await?;
            // A sub that was restarted scans anew, and reports nothing before.
            if last.counters.metadata_passes > before || last.version.instance != instance {
                break;
            }
            tokio::time::sleep(COUNTER_LOOK).await;
        }
    }
    Ok(last.version)
}

/// Polls without waiting; what the caller has is left out.
async fn look(client: &Client, have: Version) -> Result<PollReply, CallError> {
    let request = PollRequest { have: Some(have), wait_ms: 0 };
    client.call_within::<Poll>(&request, ACCEPT_LIMIT).await
}
