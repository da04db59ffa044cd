//! `domtool cert issue --mdb`: makes a certificate for each machine of a fleet.
//!
//! Each machine is done on its own: an interrupted run leaves complete certificates, and the same
//! command continues. The lock of the authority is taken for one machine at a time, so that others
//! can issue and revoke meanwhile.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use api::access::IdentityKind;
use certs::files::{FilesError, Replace};
use certs::register::Register;
use daemon::mdb_file::read;
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_PARTLY};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use model::display::{counted, error_chain};
use model::mdb::{Machine, Machines};
use serde::Serialize;
use system::clock::wall;
use tool::{Format, Output};

use super::issue::{Arguments, find_certificate, issue};
use super::renewal::{Step, default_renew_before, may_be_machine, next_step};
use super::{CertError, time_and_distance};
use crate::{columns, text_of};

/// Progress is shown after this time.
const QUIET: Duration = Duration::from_millis(250);

/// The outcome for one machine.
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

/// One machine in the output.
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
    let machines = read(mdb)?.machines;
    let stop = Arc::new(AtomicBool::new(false));
    let signal = {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    // The signal must be received while the certificates are made.
    let worker = {
        let (arguments, stop) = (arguments.clone(), Arc::clone(&stop));
        tokio::task::spawn_blocking(move || issue_all(&arguments, &register, &machines, &stop))
    };
    let rows = match worker.await {
        Ok(rows) => rows?,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    signal.abort();
    let count = |done: Done| rows.iter().filter(|row| row.done == done).count() as u64;
    let failed = count(Done::Failed);
    eprintln!(
        "{}: {} made, {} renewed, {} unchanged, {failed} failed.",
        counted(rows.len() as u64, "machine"),
        count(Done::Made),
        count(Done::Renewed),
        count(Done::Kept),
    );
    if stop.load(Ordering::Relaxed) {
        return Err(CertError::Interrupted);
    }
    let code = match failed {
        0 => EXIT_DONE,
        _ if failed == rows.len() as u64 => EXIT_FAILED,
        _ => EXIT_PARTLY,
    };
    Ok(Output { text: format.render(&rows, |rows| table(rows)), code })
}

fn issue_all(
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
        rows.push(issue_row(arguments, register, machine));
        bar.inc(1);
        if bar.is_hidden() && started.elapsed() > QUIET {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn issue_row(arguments: &Arguments, register: &Register, machine: &Machine) -> Row {
    let hostname = machine.hostname.clone();
    match issue_one(arguments, register, machine) {
        Ok((done, certificate)) => Row {
            hostname,
            done,
            serial: Some(certificate.serial),
            not_after: Some(certificate.not_after),
            error: None,
        },
        Err(error) => {
            let error = error_chain(&error);
            eprintln!("{hostname}: {error}");
            Row { hostname, done: Done::Failed, serial: None, not_after: None, error: Some(error) }
        }
    }
}

fn issue_one(
    arguments: &Arguments,
    register: &Register,
    machine: &Machine,
) -> Result<(Done, api::certificate::Certificate), CertError> {
    let hosts = hosts(arguments, machine)?;
    let name = &machine.hostname;
    let directory = arguments.out.join(name);
    let locked = register.lock()?;
    let found = find_certificate(register, &locked, &directory);
    let wanted = arguments.wanted(name, hosts, found.as_ref());
    if let Some(found) = found.as_ref().filter(|found| !may_be_machine(found, name))
        && arguments.replace() == Replace::Own
    {
        let name = IdentityKind::Machine.in_words(name);
        return Err(FilesError::other_holder(&directory, &found.certificate, name).into());
    }
    let renew_before =
        arguments.renew_before.unwrap_or_else(|| default_renew_before(arguments.lifetime));
    let end = register.authority().certificate().not_after;
    let step = match next_step(&wanted, found.as_ref(), wall().seconds, end, renew_before) {
        Step::Renew if arguments.new_key => Step::Create,
        step => step,
    };
    if let (Step::Keep, Some(found)) = (step, found) {
        return Ok((Done::Kept, found.certificate));
    }
    let issued = issue(&locked, &wanted, step, arguments, &directory)?;
    let done = if step == Step::Renew { Done::Renewed } else { Done::Made };
    Ok((done, issued.certificate))
}

/// Returns the hosts of the certificate of a machine, whose name becomes that of a directory.
fn hosts(arguments: &Arguments, machine: &Machine) -> Result<Vec<String>, CertError> {
    let name = &machine.hostname;
    if name.starts_with('.') || name.contains(['/', '*', '\0']) {
        let name = model::escape::escape(name.as_bytes());
        return Err(CertError::Hostname { name });
    }
    let address = machine.ip_address.filter(|_| arguments.with_addresses);
    let address = address.map(|address| address.to_string());
    let mut hosts = vec![name.clone()];
    hosts.extend(address.filter(|address| address != name));
    Ok(hosts)
}

/// Formats the rows of machines whose certificate changed or failed.
fn table(rows: &[Row]) -> String {
    let now = wall().seconds;
    let mut table = columns(&["HOST", "DONE", "VALID UNTIL"]);
    let shown: Vec<&Row> = rows.iter().filter(|row| row.done != Done::Kept).collect();
    if shown.is_empty() {
        return String::new();
    }
    for row in shown {
        let end = match (row.not_after, &row.error) {
            (Some(end), _) => time_and_distance(now, end),
            (None, error) => error.clone().unwrap_or_default(),
        };
        table.add_row([row.hostname.clone(), row.done.name().to_owned(), end]);
    }
    text_of(&table)
}
