//! Forgets what is held only because it may be needed again soon. So the memory a minute after an
//! update is that of a dominator that was just started.

use std::sync::Arc;
use std::time::Duration;

use crate::runtime::shared::Shared;

/// How often.
const INTERVAL: Duration = Duration::from_secs(10);

/// How long something may be unused.
pub const UNUSED_MAX: Duration = Duration::from_secs(30);

/// Never returns.
pub async fn run(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let plans = shared.images.forget_unused();
        let lists = shared.history.forget_unused();
        shared.reader.store.forget_dead();
        if plans || lists {
            // It walks the heap, which takes some milliseconds.
            let _given = tokio::task::spawn_blocking(daemon::memory::give_back).await;
        }
    }
}
