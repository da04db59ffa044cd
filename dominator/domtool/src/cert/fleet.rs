//! `domtool cert issue --mdb`: a certificate for every sub of a fleet.
//!
//! Each machine is looked at, and done, by itself: whenever this is stopped, what is there is
//! whole, and the same command goes on. The lock on the authority is held for one machine at a
//! time, so that others can issue and revoke meanwhile.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use certs::authority::now;
use certs::register::Register;
use daemon::{EXIT_DONE, EXIT_FAILED};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use model::mdb::{Machine, Machines};
use model::report::report;
use model::words::counted;
use serde::Serialize;
use tool::{Format, Output, json};

use super::issue::{Arguments, look, make};
use super::need::{Need, Wanted, need, renew_before};
use super::{CertError, until};
use crate::columns;
use daemon::mdb_file::read;

/// Nothing is shown of what takes less than this.
const QUIET: Duration = Duration::from_millis(250);

/// Some were done and others not.
const EXIT_PARTLY: u8 = 3;

/// What was done about one machine.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Done {
    Made,
    Renewed,
    Kept,
    Failed,
}

impl Done {
    fn name(&self) -> &'static str {
        match self {
            Self::Made => "made",
            Self::Renewed => "renewed",
            Self::Kept => "kept",
            Self::Failed => "failed",
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    hostname: String,
    done: Done,
    serial: Option<String>,
    not_after: Option<i64>,
    error: Option<String>,
}

pub(super) async fn run(
    format: Format,
    arguments: &Arguments,
    register: Register,
    mdb: &Path,
) -> Result<Output, CertError> {
    let machines = read(mdb)?;
    let stop = Arc::new(AtomicBool::new(false));
    let signal = {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    // The signal must be heard of while this works.
    let worker = {
        let (arguments, stop) = (arguments.clone(), Arc::clone(&stop));
        tokio::task::spawn_blocking(move || all(&arguments, &register, &machines, &stop))
    };
    let rows = match worker.await {
        Ok(rows) => rows?,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    signal.abort();
    let count = |done: Done| rows.iter().filter(|row| row.done == done).count() as u64;
    let failed = count(Done::Failed);
    eprintln!(
        "{}: {} made, {} renewed, {} still good, {failed} failed.",
        counted(rows.len() as u64, "machine"),
        count(Done::Made),
        count(Done::Renewed),
        count(Done::Kept),
    );
    if stop.load(Ordering::Relaxed) {
        return Err(CertError::Stopped);
    }
    let code = match failed {
        0 => EXIT_DONE,
        _ if failed == rows.len() as u64 => EXIT_FAILED,
        _ => EXIT_PARTLY,
    };
    let text = match format {
        Format::Table => table(&rows),
        Format::Json => json(&rows),
    };
    Ok(Output { text, code })
}

fn all(
    arguments: &Arguments,
    register: &Register,
    machines: &Machines,
    stop: &AtomicBool,
) -> Result<Vec<Row>, CertError> {
    fs_err::create_dir_all(&arguments.out)?;
    let bar =
        ProgressBar::with_draw_target(Some(machines.len() as u64), ProgressDrawTarget::hidden());
    let style = ProgressStyle::with_template(
        "certificates: {human_pos} of {human_len} [{wide_bar}] {eta} left",
    );
    bar.set_style(style.expect("the template is a constant"));
    let started = Instant::now();
    let mut rows = Vec::new();
    for machine in machines.values() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        rows.push(one(arguments, register, machine));
        bar.inc(1);
        if bar.is_hidden() && started.elapsed() > QUIET {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn one(arguments: &Arguments, register: &Register, machine: &Machine) -> Row {
    let hostname = machine.hostname.clone();
    match done(arguments, register, machine) {
        Ok((done, certificate)) => Row {
            hostname,
            done,
            serial: Some(certificate.serial),
            not_after: Some(certificate.not_after),
            error: None,
        },
        Err(error) => {
            let error = report(&error);
            eprintln!("{hostname}: {error}");
            Row { hostname, done: Done::Failed, serial: None, not_after: None, error: Some(error) }
        }
    }
}

fn done(
    arguments: &Arguments,
    register: &Register,
    machine: &Machine,
) -> Result<(Done, api::certificate::Certificate), CertError> {
    let wanted = wanted(arguments, machine)?;
    let directory = arguments.out.join(&wanted.name);
    let held = register.lock()?;
    let found = look(register, &held, &directory);
    let before = arguments.renew_before.unwrap_or_else(|| renew_before(arguments.lifetime));
    let last = register.authority().certificate().not_after;
    let need = match need(&wanted, found.as_ref(), now(), last, before) {
        Need::Renewal if arguments.new_key => Need::New,
        need => need,
    };
    if let (Need::Nothing, Some(found)) = (need, found) {
        return Ok((Done::Kept, found.certificate));
    }
    let issued = make(&held, &wanted, need, arguments, &directory)?;
    let done = if need == Need::Renewal { Done::Renewed } else { Done::Made };
    Ok((done, issued.certificate))
}

/// The certificate of a sub, whose name becomes that of a directory.
fn wanted(arguments: &Arguments, machine: &Machine) -> Result<Wanted, CertError> {
    let name = &machine.hostname;
    if name.starts_with('.') || name.contains(['/', '*', '\0']) {
        let name = model::escape::escape(name.as_bytes());
        return Err(CertError::Hostname { name });
    }
    let address = machine.ip_address.map(|address| address.to_string());
    let mut hosts = vec![name.clone()];
    hosts.extend(address.filter(|address| address != name));
    Ok(arguments.wanted(name, hosts))
}

/// Those of which there is something to tell.
fn table(rows: &[Row]) -> String {
    let now = now();
    let mut table = columns(&["HOST", "DONE", "VALID UNTIL"]);
    let told: Vec<&Row> = rows.iter().filter(|row| row.done != Done::Kept).collect();
    if told.is_empty() {
        return String::new();
    }
    for row in told {
        let end = match (row.not_after, &row.error) {
            (Some(end), _) => until(now, end),
            (None, error) => error.clone().unwrap_or_default(),
        };
        table.add_row([row.hostname.clone(), row.done.name().to_owned(), end]);
    }
    format!("{}\n", table.trim_fmt())
}
