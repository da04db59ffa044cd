//! One rendering of a large page for all readers who wait for it.

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use daemon::memory::FreedMemory;
use rpc::server::Query;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// The last rendering of a page. The page of all machines costs milliseconds and holds the lock of
/// the fleet: fifty readers who each had their own would delay each other, the calls of tools, and
/// edits of the machine database.
#[derive(Clone, Default)]
pub(super) struct SharedPage(Arc<Mutex<Option<Rendering>>>);

struct Rendering {
    query: Query,
    begun: Instant,
    html: String,
}

impl SharedPage {
    /// Returns what `render` gives for `query`. One rendering runs at a time, on a thread that may
    /// block, and to its end, also if its reader goes away. Who asks while one runs gets the next
    /// one, with all others who have asked the same by then: no reader sees less than what was so
    /// when he asked.
    pub(super) async fn get<F>(&self, query: &Query, render: F) -> Result<String, Fault>
    where
        F: FnOnce() -> String + Send + 'static,
    {
        // A page has hundreds of kilobytes. With many readers there is always one here.
        let _memory = FreedMemory::keep();
        let asked = Instant::now();
        let mut last = Arc::clone(&self.0).lock_owned().await;
        if let Some(last) = &*last
            && last.begun >= asked
            && last.query == *query
        {
            return Ok(last.html.clone());
        }
        let query = query.clone();
        let rendering = tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            let html = render();
            *last = Some(Rendering { query, begun, html: html.clone() });
            html
        });
        rendering.await.map_err(|_| Fault::new(FaultCode::Internal, "the page could not be made"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    #[tokio::test]
    async fn readers_who_wait_share_the_next_rendering() {
        let (page, count) = (SharedPage::default(), Arc::new(AtomicU32::new(0)));
        let (release, wait) = channel::<()>();
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

    #[tokio::test]
    async fn a_rendering_whose_reader_goes_away_goes_on_alone() {
        let (page, running) = (SharedPage::default(), Arc::new(AtomicU32::new(0)));
        let (release, wait) = channel::<()>();
        let (first, counted) = (page.clone(), Arc::clone(&running));
        let reader = tokio::spawn(async move {
            let render = move || {
                counted.fetch_add(1, Ordering::SeqCst);
                // An error is the end of the test.
                let _released = wait.recv();
                counted.fetch_sub(1, Ordering::SeqCst);
                String::new()
            };
            first.get(&Query::default(), render).await.map(drop)
        });
        while running.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        reader.abort();
        reader.await.unwrap_err();
        let seen = Arc::clone(&running);
        let render = move || seen.load(Ordering::SeqCst).to_string();
        let query = Query::default();
        let second = page.get(&query, render);
        let release = async {
            tokio::task::yield_now().await;
            release.send(()).unwrap();
        };
        let (second, ()) = futures_util::future::join(second, release).await;
        assert_eq!(second.unwrap(), "0");
    }
}
