//! Logging, listening and stopping.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::OnceLock;

use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{EnvFilter, reload};

use super::EXIT_FAILED;
use super::security::SecurityError;
use rpc::tls::Security;

/// How many connections may wait to be accepted, if the kernel allows it (`somaxconn`). A fleet
/// that returns after a power cut connects at once; connections beyond a full queue are dropped or
/// reset.
const QUEUE_MAX: u32 = 65_535;

/// What a daemon logs to stderr, and how.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug or trace, or directives such as info,subd=debug
    #[arg(long = "log", value_name = "LEVEL", default_value = "info")]
    pub filter: String,

    /// How to log: lines of text for people, or one JSON object per line for log collectors
    #[arg(long = "log-format", value_enum, value_name = "FORMAT", default_value_t)]
    pub format: LogFormat,
}

/// How a daemon logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines of text, for people
    #[default]
    Text,
    /// One JSON object per line: `timestamp`, `level`, `message` and further fields
    Json,
}

/// Logs to stderr, one line per event. The filter is a level (`error`, `warn`, `info`, `debug`,
/// `trace`) or directives such as `info,subd=debug`. Only the first call of a process counts.
///
/// Libraries that log every frame stay at `info` unless a directive names them: `h2=debug`.
///
/// # Errors
///
/// The text of what is wrong with the filter.
pub fn start_logging(log: &LogArgs) -> Result<(), String> {
    let filter = filter_of(&log.filter)?;
    let colours = io::IsTerminal::is_terminal(&io::stderr());
    let logging = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_target(false)
        .with_ansi(colours)
        // tracing would report a failed write to stderr, and panic if that fails too.
        .log_internal_errors(false);
    let (result, set) = match log.format {
        LogFormat::Text => {
            let logging = logging.with_filter_reloading();
            let handle = logging.reload_handle();
            let set: SetFilter = Box::new(move |filter| handle.reload(filter));
            (logging.try_init(), set)
        }
        LogFormat::Json => {
            let logging = logging.json().flatten_event(true).with_span_list(false);
            let logging = logging.with_filter_reloading();
            let handle = logging.reload_handle();
            let set: SetFilter = Box::new(move |filter| handle.reload(filter));
            (logging.try_init(), set)
        }
    };
    match result {
        Ok(()) => drop(SET_FILTER.set(set)),
        Err(error) => tracing::debug!("logging was started before: {error}"),
    }
    Ok(())
}

type SetFilter = Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>;

/// Changes the filter of the log that this process has started.
static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

/// Changes the filter of the log.
///
/// # Errors
///
/// The text of what is wrong with the filter, or that nothing is logged.
pub fn set_log_filter(filter: &str) -> Result<(), String> {
    let filter = filter_of(filter)?;
    let set = SET_FILTER.get().ok_or("logging was not started")?;
    set(filter).map_err(|error| error.to_string())
}

fn filter_of(filter: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(without_chatter(filter))
        .map_err(|error| format!("invalid log level `{filter}`: {error}"))
}

/// Libraries that log every frame at `debug`.
const CHATTY: [&str; 3] = ["h2", "hyper", "hyper_util"];

/// Adds `info` for the [`CHATTY`] libraries that `filter` does not name.
fn without_chatter(filter: &str) -> String {
    let given: Vec<&str> = filter.split(',').map(str::trim).collect();
    let is_loud = given.iter().any(|one| {
        ["debug", "trace", "4", "5"].iter().any(|level| one.eq_ignore_ascii_case(level))
    });
    let mut all = filter.to_owned();
    for library in CHATTY.iter().filter(|_| is_loud) {
        let names = |one: &&str| one.split(['=', ':', '[']).next() == Some(*library);
        if !given.iter().any(names) {
            all.push_str(&format!(",{library}=info"));
        }
    }
    all
}

/// Returns a token that SIGTERM and SIGINT cancel. A second signal ends the process at once.
///
/// # Errors
///
/// Fails if signals cannot be caught.
pub fn stop_on_signals() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let cancel = stop.clone();
    // Lives as long as the process: it waits for the second signal.
    tokio::spawn(async move {
        let mut wait = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        // Not inside the macros: they evaluate their arguments only if the level is logged.
        let first = wait().await;
        tracing::info!("stopping: {first}");
        cancel.cancel();
        let second = wait().await;
        tracing::warn!("ending at once: second {second}");
        std::process::exit(i32::from(EXIT_FAILED));
    });
    Ok(stop)
}

/// Logs each SIGHUP instead of being ended by it. For daemons that read no configuration again.
pub fn ignore_hangup() -> io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            tracing::info!("SIGHUP is ignored: restart the daemon to change its flags");
        }
    });
    Ok(())
}

/// Raises the limit of open files and connections to the hard limit, for this process and its
/// children, and returns it. For daemons with thousands of peers or files, not for subd: its
/// children would inherit the limit.
pub fn raise_file_limit() -> io::Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Why a daemon cannot listen on an address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    #[error("invalid address to listen on, `{text}`: expected ADDR, :PORT or ADDR:PORT")]
    Address { text: String },
    #[error("cannot resolve `{text}`")]
    Resolve { text: String, source: io::Error },
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
}

/// Listens on `address`. Port 0 selects a free port. If the kernel has no IPv6, the unspecified
/// IPv6 address means the IPv4 one.
pub async fn listen(
    daemon: &str,
    security: &Security,
    address: SocketAddr,
) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError::Listen { address, source };
    let listener = match bind(address) {
        Err(error)
            if error.raw_os_error() == Some(nix::errno::Errno::EAFNOSUPPORT as i32)
                && address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) =>
        {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        result => result,
    }
    .map_err(failed)?;
    let local = listener.local_addr().map_err(failed)?;
    tracing::info!("{daemon} listening on {}://{local}", security.scheme());
    Ok(listener)
}

/// Listens with the longest queue that the kernel allows.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    // A daemon that starts again must not wait for connections of the former one to be forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE_MAX)
}

/// Listens on an address in text form: `ADDR:PORT`, `:PORT` (all addresses), `ADDR`, or nothing
/// (all addresses, the default port).
pub async fn listen_text(
    daemon: &str,
    security: &Security,
    text: &str,
    default_port: u16,
) -> Result<TcpListener, ListenError> {
    let bad = || ListenError::Address { text: text.to_owned() };
    let all = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let address = match text.strip_prefix(':') {
        Some(port) => SocketAddr::new(all, port.parse().map_err(|_| bad())?),
        None if text.is_empty() => SocketAddr::new(all, default_port),
        None => {
            let peer = rpc::client::Peer::parse(text, default_port).map_err(|_| bad())?;
            let resolved = tokio::net::lookup_host((peer.host.as_str(), peer.port)).await;
            let unresolved = |source| ListenError::Resolve { text: text.to_owned(), source };
            let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            let mut found = resolved.map_err(unresolved)?;
            found.next().ok_or_else(|| unresolved(none()))?
        }
    };
    listen(daemon, security, address).await
}

/// Prints `error: ...` and the hints, and returns the exit code.
pub fn exit(code: u8, error: &str, hints: &[&str]) -> ExitCode {
    print_error(error, hints);
    ExitCode::from(code)
}

/// Prints `error: ...` and the hints to standard error.
pub fn print_error(error: &str, hints: &[&str]) {
    let mut text = format!("error: {error}\n");
    for hint in hints {
        text.push_str(&format!("hint: {hint}\n"));
    }
    // Parts of the text come from other machines. If stderr is closed, it cannot be shown.
    let _closed = io::stderr().write_all(model::display::safe_lines(&text).as_bytes());
}

/// Returns the result of `main`: prints an error with its causes. Wrong security flags are misuse,
/// everything else is a failure.
pub fn exit_on_error(result: Result<(), Box<dyn std::error::Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref::<SecurityError>() {
            Some(security) => security.exit(),
            None => exit(EXIT_FAILED, &model::display::error_chain(error.as_ref()), &[]),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_cancels_the_token() {
        let stop = stop_on_signals().unwrap();
        assert!(!stop.is_cancelled());
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGTERM).unwrap();
        stop.cancelled().await;
    }

    #[tokio::test]
    async fn addresses_are_read_as_operators_write_them() {
        for text in ["127.0.0.1:0", "127.0.0.1", "localhost:0", ":0", "", "[::]:0"] {
            let listener = listen_text("testd", &Security::Insecure, text, 0).await.unwrap();
            assert_ne!(listener.local_addr().unwrap().port(), 0, "{text}");
        }
        for text in [":x", "a b", "127.0.0.1:x", "[::1"] {
            let error = listen_text("testd", &Security::Insecure, text, 0).await.unwrap_err();
            assert!(matches!(error, ListenError::Address { .. }), "{error}");
        }
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_named() {
        let first = listen_text("testd", &Security::Insecure, "127.0.0.1:0", 0).await.unwrap();
        let address = first.local_addr().unwrap();
        let error = listen("testd", &Security::Insecure, address).await.unwrap_err();
        let text = format!("cannot listen on {address}: Address already in use (os error 98)");
        assert_eq!(model::display::error_chain(&error), text);
    }

    #[tokio::test]
    async fn a_fleet_may_connect_at_one_moment() {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
        let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let fleet = allowed.trim().parse::<usize>().unwrap().min(1_500);
        let listener =
            listen("testd", &Security::Insecure, (Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let limit = std::time::Duration::from_secs(30);
        // Nobody accepts: all of them wait in the queue.
        let waiting: Vec<_> = (0..fleet)
            .map(|number| {
                let connection = std::net::TcpStream::connect_timeout(&address, limit);
                connection.unwrap_or_else(|error| panic!("connection {number}: {error}"))
            })
            .collect();
        assert_eq!(waiting.len(), fleet);
    }

    #[test]
    fn log_levels_are_checked() {
        let log = LogArgs { filter: "info,common=loud".to_owned(), format: LogFormat::Text };
        assert!(start_logging(&log).is_err());
    }

    #[test]
    fn chatty_libraries_are_quiet_unless_named() {
        let table = [
            ("info", "info"),
            ("debug", "debug,h2=info,hyper=info,hyper_util=info"),
            ("TRACE,h2=debug", "TRACE,h2=debug,hyper=info,hyper_util=info"),
            ("info,subd=debug", "info,subd=debug"),
            ("debug,hyper::proto=trace", "debug,hyper::proto=trace,h2=info,hyper_util=info"),
        ];
        for (filter, expected) in table {
            assert_eq!(without_chatter(filter), expected);
        }
    }
}
