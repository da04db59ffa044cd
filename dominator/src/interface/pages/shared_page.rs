//! One rendering of a large page for all readers who wait for it.

use api::fault::{Fault, FaultCode};
use rpc::server::Query;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// The last rendering of a page. The page of all machines costs milliseconds and holds the lock of
/// the fleet: fifty readers who each had their own would delay each other, the calls of tools, and
/// edits of the machine database.
#[derive(Default)]
pub(super) struct SharedPage(Mutex<Option<Rendering>>);

struct Rendering {
    query: Query,
    begun: Instant,
    html: String,
}

impl SharedPage {
    /// Returns what `render` gives for `query`. One rendering runs at a time, on a thread that may
    /// block. Who asks while one runs gets the next one, with all others who have asked the same by
    /// then: no reader sees less than what was so when he asked.
    pub(super) async fn get<F>(&self, query: &Query, render: F) -> Result<String, Fault>
    where
        F: FnOnce() -> String + Send + 'static,
    {
        let asked = Instant::now();
        let mut last = self.0.lock().await;
        if let Some(last) = &*last
            && last.begun >= asked
            && last.query == *query
        {
            return Ok(last.html.clone());
        }
        let begun = Instant::now();
        let failed = |_| Fault::new(FaultCode::Internal, "the page could not be made");
        let html = tokio::task::spawn_blocking(render).await.map_err(failed)?;
        *last = Some(Rendering { query: query.clone(), begun, html: html.clone() });
        Ok(html)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn readers_who_wait_share_the_next_rendering() {
        let (page, count) = (Arc::new(SharedPage::default()), Arc::new(AtomicU32::new(0)));
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let read = async |wait: Option<std::sync::mpsc::Receiver<()>>| {
            let counted = Arc::clone(&count);
            let render = move || {
                let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
                // An error is the end of the test.
                let _released = wait.map(|wait| wait.recv());
                number.to_string()
            };
            page.get(&Query::default(), render).await.unwrap()
        };
        let others = async {
            while count.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            let others = futures_util::future::join_all((0..50).map(|_| read(None)));
            let release = async {
                tokio::task::yield_now().await;
                release.send(()).unwrap();
            };
            futures_util::future::join(others, release).await.0
        };
        let (first, others) = futures_util::future::join(read(Some(wait)), others).await;
        assert_eq!((first, others), ("1".to_owned(), vec!["2".to_owned(); 50]));
        assert_eq!(read(None).await, "3");
    }
}
