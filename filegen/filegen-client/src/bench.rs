//! `filegen-client bench`: how many files a server makes in a second.

use std::time::{Duration, Instant};

use api::file_generator::GeneratedFile;
use model::object::Algorithm;
use model::path::TreePath;
use serde::Serialize;
use tool::Output;

use super::files::{batch, generate, machines, request};
use super::{SERVER, Servers, ToolError};

#[derive(Serialize)]
struct Measured {
    machines: usize,
    files: usize,
    failures: usize,
    seconds: f64,
    files_per_second: f64,
}

/// Asks for `paths` of all machines again and again for `time`, with `connections` requests at
/// once.
pub async fn run(
    servers: &Servers,
    paths: &[TreePath],
    time: Duration,
    connections: u16,
) -> Result<Output, ToolError> {
    let machines = machines(servers).await?;
    let start = Instant::now();
    let mut workers = Vec::new();
    for number in 0..usize::from(connections) {
        let client = servers.generator(SERVER)?;
        let size = batch(paths.len());
        let batches = machines.chunks(size).skip(number % machines.len().div_ceil(size));
        let requests: Vec<_> =
            batches.map(|batch| request(batch, Algorithm::Blake3, paths)).collect();
        workers.push(tokio::spawn(async move {
            let (mut files, mut failures) = (0, 0);
            for request in requests.iter().cycle() {
                if start.elapsed() >= time {
                    break;
                }
                let made = generate(&client, request).await?;
                let failed = |file: &&GeneratedFile| matches!(file, GeneratedFile::Failed(_));
                files += made.iter().map(Vec::len).sum::<usize>();
                failures += made.iter().flatten().filter(failed).count();
            }
            Ok::<_, ToolError>((files, failures))
        }));
    }
    let (mut files, mut failures) = (0, 0);
    for worker in workers {
        let done = worker.await.expect("a worker does not panic")?;
        (files, failures) = (files + done.0, failures + done.1);
    }
    let seconds = start.elapsed().as_secs_f64();
    let files_per_second = files as f64 / seconds;
    let machines = machines.len();
    let measured = Measured { machines, files, failures, seconds, files_per_second };
    let text = servers.arguments.format.render(&measured, |measured| {
        let Measured { machines, files, failures, seconds, files_per_second } = measured;
        format!(
            "{files} files for {machines} machines in {seconds:.1} s: {files_per_second:.0} files \
             a second, {failures} failures\n"
        )
    });
    Ok(text.into())
}
