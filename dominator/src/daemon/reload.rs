//! Takes a configuration that was changed while the dominator runs.

use std::sync::Arc;

use daemon::set_log_filter;
use tokio::sync::{mpsc, watch};

use crate::daemon::Arguments;
use crate::runtime::fleet::Fleet;

/// Puts what changes in `arguments` in force, as far as that can be done; for ever. `alarms` has
/// the words of the command that tells of alarms.
pub async fn follow(
    fleet: Arc<Fleet>,
    mut arguments: Arguments,
    mut changed: mpsc::Receiver<Arguments>,
    alarms: watch::Sender<Vec<String>>,
) {
    while let Some(new) = changed.recv().await {
        for flag in arguments.fixed_that_differ(&new) {
            tracing::error!("--{flag} takes effect at the next start only");
        }
        if new.log.filter != arguments.log.filter
            && let Err(error) = set_log_filter(&new.log.filter)
        {
            tracing::error!("the log goes on as it was: {error}");
        }
        fleet.set_mdb_limits(new.mdb_limits());
        fleet.shared().claim_service.set(new.budgets.settings());
        alarms.send_if_modified(|program| {
            let new = new.alarm_program();
            let is_other = *program != new;
            *program = new;
            is_other
        });
        tracing::warn!("the configuration was read again");
        arguments = arguments.with_changeable(new);
    }
}
