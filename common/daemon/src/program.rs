//! Runs an operator's program with an input, and returns its output.
//!
//! The program gets its own process group, which is killed when the program takes too long or its
//! result is no longer awaited. It must not leave background processes that hold its output open:
//! their end is awaited.

use std::io;
use std::process::{ExitStatus, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, User};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// How many bytes of the end of its standard error are kept.
const STDERR_BYTES_MAX: usize = 2 << 10;

/// Where another user finds programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    #[error("cannot run {program}")]
    Start { program: String, source: io::Error },
    #[error("cannot write the input or read the output of {program}")]
    Read { program: String, source: io::Error },
    #[error("{program} prints more than {limit} bytes")]
    TooLarge {
        program: String,
        /// The limit, in bytes.
        limit: usize,
    },
    #[error("{program}: {status}{}", after_colon(stderr_line))]
    Failed {
        program: String,
        status: ExitStatus,
        /// The last line of its standard error.
        stderr_line: String,
    },
}

fn after_colon(stderr_line: &str) -> String {
    if stderr_line.is_empty() { String::new() } else { format!(": {stderr_line}") }
}

/// Runs the program `line[0]` with the other words as arguments and `input` as standard input,
/// which it may ignore, and returns its output of at most `limit` bytes. If the future is dropped
/// the program and its children are killed.
pub async fn output(line: &[String], input: &[u8], limit: usize) -> Result<Vec<u8>, CommandError> {
    output_as(None, line, input, limit).await
}

/// As [`output`], as another user with its primary group only, and with nothing of the environment
/// but `PATH`, `HOME`, `USER` and `LANG`. Only root can run programs so; the capabilities of root
/// go with the change of the user.
pub async fn output_as(
    user: Option<&User>,
    line: &[String],
    input: &[u8],
    limit: usize,
) -> Result<Vec<u8>, CommandError> {
    let (program, arguments) = match line.split_first() {
        Some((program, arguments)) => (program.as_str(), arguments),
        None => ("", line),
    };
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(user) = user {
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        command.env_clear().envs([("PATH", PATH), ("LANG", "C.UTF-8"), ("USER", &user.name)]);
        command.env("HOME", &user.dir);
    }
    output_of(command, input, limit).await
}

/// As [`output`], of a command whose environment and user the caller has set.
pub async fn output_of(
    mut command: Command,
    input: &[u8],
    limit: usize,
) -> Result<Vec<u8>, CommandError> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let named = || program.clone();
    command
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    let start = |source| CommandError::Start { program: named(), source };
    let mut running = Running(command.spawn().map_err(start)?);
    let pipes = (running.0.stdin.take(), running.0.stdout.take(), running.0.stderr.take());
    let (Some(mut stdin), Some(stdout), Some(stderr_pipe)) = pipes else {
        return Err(start(io::Error::other("it has no output")));
    };
    let failed = |source| CommandError::Read { program: named(), source };
    let length_max = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let mut printed = Vec::new();
    let print = async {
        stdout.take(length_max).read_to_end(&mut printed).await.map_err(failed)?;
        match printed.len() {
            length if length > limit => Err(CommandError::TooLarge { program: named(), limit }),
            _ => Ok(()),
        }
    };
    let complain = async { tail(stderr_pipe).await.map_err(failed) };
    // Moved, so that the pipe is closed after the last byte.
    let give = async move {
        match stdin.write_all(input).await {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failed(error)),
            // The program need not read its input.
            _ => Ok(()),
        }
    };
    let ((), (), stderr) = tokio::try_join!(give, print, complain)?;
    // The child is reaped only here. Until then the kernel gives the id of its group to no other.
    let status = running.0.wait().await.map_err(failed)?;
    if status.success() {
        return Ok(printed);
    }
    let stderr = String::from_utf8_lossy(&stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let stderr_line = model::display::safe_text(last.trim(), STDERR_BYTES_MAX);
    Err(CommandError::Failed { program: named(), status, stderr_line })
}

/// Returns the last [`STDERR_BYTES_MAX`] bytes of `stream`.
async fn tail(mut stream: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    let mut buffer = [0; STDERR_BYTES_MAX];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(kept),
            length => kept.extend_from_slice(&buffer[..length]),
        }
        let surplus = kept.len().saturating_sub(STDERR_BYTES_MAX);
        kept.drain(..surplus);
    }
}

/// A running command; its process group is killed if this is dropped before the command was waited
/// for.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let Some(group) = self.0.id().and_then(|id| i32::try_from(id).ok()) else { return };
        if let Err(error) = killpg(Pid::from_raw(group), Signal::SIGKILL) {
            tracing::warn!(%error, group, "cannot kill a command");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use model::display::error_chain;

    use super::*;

    async fn shell(script: &str) -> Result<String, String> {
        let line = ["/bin/sh", "-c", script].map(str::to_owned);
        match output(&line, b"read", 1_000).await {
            Ok(bytes) => Ok(String::from_utf8(bytes).unwrap()),
            Err(error) => Err(error_chain(&error)),
        }
    }

    #[tokio::test]
    async fn what_is_printed_counts_only_after_a_good_end() {
        let table = [
            ("echo a; echo noise >&2", Ok("a\n")),
            ("cat", Ok("read")),
            ("exec <&-; echo deaf", Ok("deaf\n")),
            ("pwd", Ok("/\n")),
            ("echo a; exit 3", Err("/bin/sh: exit status: 3")),
            (
                "echo first >&2; echo ' last' >&2; echo >&2; exit 1",
                Err("/bin/sh: exit status: 1: last"),
            ),
            ("kill -9 $$", Err("/bin/sh: signal: 9 (SIGKILL)")),
            (
                "head -c 100000 /dev/zero | tr '\\0' x >&2; echo >&2; echo end >&2; exit 1",
                Err("/bin/sh: exit status: 1: end"),
            ),
        ];
        for (script, expected) in table {
            let got = shell(script).await;
            assert_eq!(got.as_deref().map_err(String::as_str), expected, "{script}");
        }
        let large = shell("head -c 1001 /dev/zero").await;
        assert_eq!(large, Err("/bin/sh prints more than 1000 bytes".to_owned()));
        let error = output(&["/no/such".to_owned()], b"", 1).await.unwrap_err();
        assert_eq!(
            error_chain(&error),
            "cannot run /no/such: No such file or directory (os error 2)"
        );
    }

    #[tokio::test]
    async fn a_command_that_is_late_is_killed_with_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        let file = pids.display();
        let script = format!("sleep 600 & echo $! $$ > {file}.new; mv {file}.new {file}; wait");
        let line = ["/bin/sh".to_owned(), "-c".to_owned(), script];
        let deadline = Instant::now() + Duration::from_secs(20);
        tokio::select! {
            result = output(&line, b"", 1) => panic!("{result:?}"),
            () = async {
                while !pids.exists() {
                    assert!(Instant::now() < deadline);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            } => {}
        }
        let runs = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = stat.rsplit(')').next().unwrap_or_default().trim().chars().next();
            state.is_some_and(|state| state != 'Z')
        };
        for pid in std::fs::read_to_string(&pids).unwrap().split_whitespace() {
            while runs(pid) {
                assert!(Instant::now() < deadline, "{pid} still runs");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
