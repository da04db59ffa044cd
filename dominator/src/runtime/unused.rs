//! Forgets plans, lists of changes and images that no machine needed lately. They are held because
//! the next machine may need the same.

use std::sync::Arc;
use std::time::Duration;

use crate::runtime::shared::Shared;

/// How often they are looked for.
const INTERVAL: Duration = Duration::from_secs(10);

/// How long they may be unused.
pub const UNUSED_MAX: Duration = Duration::from_secs(30);

/// Forgets what nobody uses, from now on. Never returns.
pub async fn forget_regularly(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        shared.images.forget_unused();
        shared.history.forget_unused();
        shared.reader.store.forget_dead();
    }
}
