//! Follows the machine database of an mdbd, instead of a file.
//!
//! What comes is taken or refused as a file's content is; while the server cannot be reached the
//! last good database stays in force.

use std::sync::Arc;
use std::time::Duration;

use api::mdb::{GetMdb, GetMdbRequest};
use model::mdb::{Machine, MdbError, parse};
use model::report::report;
use rpc::client::Client;

use crate::core::timing::{POLL_WAIT, RETRY_FIRST, RETRY_LONGEST};
use crate::runtime::fleet::Fleet;
use model::backoff::{doubled, jittered};
use system::random::random;

/// How much longer than it asked for an answer may take.
const SLACK: Duration = Duration::from_secs(30);

/// The pause after an answer, so that a restless server is not asked all the time.
const PAUSE: Duration = Duration::from_millis(100);

/// A machine database that is none.
#[derive(Debug, thiserror::Error)]
#[error("from {server}")]
struct FollowError {
    server: String,
    #[source]
    source: MdbError,
}

/// Asks the server for ever and gives what is new to `fleet`.
pub async fn follow(client: Client, fleet: Arc<Fleet>) {
    let (mut have, mut failures) = (None, 0);
    loop {
        let jitter = u16::try_from(random() % 1_000).unwrap_or_default();
        let wait = jittered(POLL_WAIT, jitter);
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let request = GetMdbRequest { have, wait_ms };
        let pause = match client.call_within::<GetMdb>(&request, wait + SLACK).await {
            Ok(reply) => {
                failures = 0;
                have = Some(reply.version);
                if let Some(machines) = reply.machines {
                    let (server, fleet) = (client.peer().to_string(), Arc::clone(&fleet));
                    let taking = tokio::task::spawn_blocking(move || {
                        if let Err(error) = take(&machines, server, &fleet) {
                            fleet.refuse(report(&error));
                        }
                    });
                    if taking.await.is_err() {
                        return;
                    }
                }
                PAUSE
            }
            Err(error) => {
                failures += 1;
                // The next answer takes the error back, so it must have the machines.
                have = None;
                fleet.refuse(report(&error));
                jittered(doubled(RETRY_FIRST, RETRY_LONGEST, failures), jitter)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Checks the machines as those of a file are checked, and takes them.
fn take(machines: &[Machine], server: String, fleet: &Fleet) -> Result<(), FollowError> {
    let text = serde_json::to_string(machines).expect("machines have a JSON");
    fleet.take(parse(&text).map_err(|source| FollowError { server, source })?);
    Ok(())
}
