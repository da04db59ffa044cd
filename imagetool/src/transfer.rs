//! Transfers objects between this program and the image server: uploads, downloads, and trees that
//! are restored in a directory.

pub mod contents;
pub mod directories;
pub mod download;
pub mod restore;
pub mod small_files;
pub mod upload;

use tokio::task::JoinHandle;

/// Waits for a blocking task. A panic of the task continues here.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
