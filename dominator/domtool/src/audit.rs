//! `domtool audit show` and `verify`: reads the files of an audit log.

mod calls;

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use api::audit::record::{self, timestamp};
use api::audit::verify::{ChainReport, ExpectedHead, Finding, Verifier};
use clap::{Args, Subcommand};
use daemon::{EXIT_DONE, EXIT_FAILED, exit};
use model::display::{counted, error_chain, safe_text};
use model::tree::Time;
use rpc::audit_log::{files_of, read_line};
use serde::Serialize;
use system::clock::parse_past;
use tool::{Format, Output};

use super::{columns, text_of};
use calls::{Call, CallFilter, Calls};

/// Number of attempts to open all files while the daemon renames them.
const LIST_TRIES: usize = 5;

/// Longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 200;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show the calls in the files of an audit log, newest last
    #[command(after_help = "Examples:\n  \
        domtool audit show /var/lib/imageserver/audit/audit.log --since 2d\n  \
        domtool audit show /.subd/audit/audit.log --method 'Subd.Commit' --format json\n\n\
        The outcome `unknown` means that the log has no end of the call: it still runs, its\n\
        caller disconnected, or the daemon was killed. The call may have taken effect or not.")]
    Show(ShowArguments),
    /// Check that the files of an audit log are as the daemon wrote them
    ///
    /// Each record has the hash of the record before it, so the command finds records that were
    /// changed, removed, added or moved. A log that was cut off at its end, or rewritten from some
    /// record on, is found only with a head that was saved elsewhere: daemons log the head every
    /// hour and show it at /audit and in /metrics. Exit code 1: the log is broken.
    #[command(after_help = "Examples:\n  \
        domtool audit verify /var/lib/dominator/audit/audit.log\n  \
        domtool audit verify audit.log --expect-head 4711:56f87f68f05d")]
    Verify(VerifyArguments),
}

#[derive(Debug, Args)]
pub(super) struct ShowArguments {
    /// File that the daemon writes; its predecessors are read too
    #[arg(value_name = "FILE", default_value = "/var/lib/dominator/audit/audit.log")]
    files: Vec<PathBuf>,
    /// Only calls since then: 12h or 1d ago, or 18:30 or 2030-01-31T18:30
    #[arg(long, value_name = "TIME|DURATION", value_parser = parse_past)]
    since: Option<Time>,
    /// Only calls until then
    #[arg(long, value_name = "TIME|DURATION", value_parser = parse_past)]
    until: Option<Time>,
    /// Only calls of this user, by certificate or as the caller stated
    #[arg(long, value_name = "USER")]
    user: Vec<String>,
    /// Only calls of matching methods: `*` matches any text
    #[arg(long, value_name = "PATTERN")]
    method: Vec<String>,
    /// Print at most this many calls, the newest; 0 for all
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    limit: usize,
}

#[derive(Debug, Args)]
pub(super) struct VerifyArguments {
    /// File that the daemon writes; its predecessors are read too
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Head that was seen before: the log must still have that record, unchanged; may be repeated
    #[arg(long, value_name = "SEQUENCE:HASH")]
    expect_head: Vec<ExpectedHead>,
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error("cannot read `{}`", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("there is no audit log `{}`", path.display())]
    None { path: PathBuf },
}

impl ReadError {
    fn hints(&self) -> &'static [&'static str] {
        match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                &["only the user of the daemon may read its audit log: try sudo"]
            }
            Self::Io { .. } => &[],
            Self::None { .. } => {
                &["a daemon has its audit log in its state directory, as audit/audit.log, unless \
                 --audit-log of the daemon names another file"]
            }
        }
    }
}

/// Runs `command`, which needs no daemon.
pub(super) fn run(command: &Command, format: Format) -> ExitCode {
    let done = match command {
        Command::Show(arguments) => show(arguments, format),
        Command::Verify(arguments) => verify(arguments, format),
    };
    match done {
        Ok(output) => output.print(),
        Err(error) => exit(EXIT_FAILED, &error_chain(&error), error.hints()),
    }
}

/// Opens the files of these logs, in the order of their records.
fn open_files(paths: &[PathBuf]) -> Result<Vec<(PathBuf, File)>, ReadError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ReadError::Io { path, source }
    };
    let list = || {
        let mut all = Vec::new();
        for path in paths {
            let files = files_of(path).map_err(failed(path))?;
            if files.is_empty() {
                return Err(ReadError::None { path: path.clone() });
            }
            all.extend(files);
        }
        all.sort();
        all.dedup();
        Ok(all)
    };
    let mut before: Vec<PathBuf> = list()?;
    for _ in 0..LIST_TRIES {
        let mut files = Vec::new();
        for path in &before {
            let file = File::open(path).map_err(failed(path))?;
            let first = first_sequence(&file).map_err(failed(path))?;
            files.push((first, path.clone(), file));
        }
        // A daemon that starts a new file meanwhile renames this one.
        let now = list()?;
        if now == before {
            files.sort_by(|(first, path, _), (other, path_of_other, _)| {
                (first, path).cmp(&(other, path_of_other))
            });
            return Ok(files.into_iter().map(|(_, path, file)| (path, file)).collect());
        }
        before = now;
    }
    let source = io::Error::other("the files are renamed all the time");
    Err(failed(&paths[0])(source))
}

/// Returns the number of the first record of a file; the highest number if it has none.
fn first_sequence(file: &File) -> io::Result<u64> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(file.try_clone()?);
    read_line(&mut reader, &mut line)?;
    io::Seek::rewind(&mut &*file)?;
    let opened = line.strip_suffix(b"\n").map(record::check_line);
    Ok(opened.and_then(Result::ok).map_or(u64::MAX, |sealed| sealed.head.sequence))
}

/// Calls `take` for each file, without a line, and then for each of its lines.
fn read(
    files: Vec<(PathBuf, File)>,
    mut take: impl FnMut(&Path, Option<&[u8]>),
) -> Result<(), ReadError> {
    for (path, file) in files {
        take(&path, None);
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            let length = read_line(&mut reader, &mut line)
                .map_err(|source| ReadError::Io { path: path.clone(), source })?;
            if length == 0 {
                break;
            }
            take(&path, Some(&line));
        }
    }
    Ok(())
}

fn show(arguments: &ShowArguments, format: Format) -> Result<Output, ReadError> {
    let (mut calls, mut unreadable) = (Calls::default(), 0);
    read(open_files(&arguments.files)?, |_, line| {
        let Some(line) = line else { return };
        let opened = line.strip_suffix(b"\n").map(record::check_line);
        match opened.and_then(Result::ok).and_then(|sealed| sealed.record) {
            Some(record) => calls.add(record),
            None => unreadable += 1,
        }
    })?;
    if unreadable > 0 {
        let lines = counted(unreadable, "line");
        eprintln!("cannot read {lines}: domtool audit verify shows where");
    }
    let filter = CallFilter {
        since: arguments.since.map(timestamp),
        until: arguments.until.map(timestamp),
        users: arguments.user.clone(),
        methods: arguments.method.clone(),
    };
    let calls = calls.finish(&filter, arguments.limit);
    Ok(format.render(&calls, |calls| table(calls)).into())
}

fn table(calls: &[Call]) -> String {
    let mut table = columns(&["TIME", "DAEMON", "WHO", "WHAT", "OUTCOME", "WHY"]);
    let cell = |text: &str| safe_text(text, CELL_BYTES_MAX);
    for row in calls {
        let second = row.time.split('.').next().unwrap_or_default();
        let name = match (row.user.as_str(), row.who.as_str()) {
            ("", "") => "",
            ("", who) => who,
            (user, _) => user,
        };
        let who = match (name, row.address.as_str()) {
            ("", "") => "(daemon)".to_owned(),
            ("", address) => address.to_owned(),
            (name, "") => name.to_owned(),
            (name, address) => format!("{name} ({address})"),
        };
        let what = format!("{} {}", row.method, row.arguments);
        let outcome = match row.text.as_str() {
            "" => row.outcome.to_owned(),
            text => format!("{}: {text}", row.outcome),
        };
        table.add_row([
            format!("{second}Z"),
            row.daemon.clone(),
            cell(&who),
            cell(what.trim_end()),
            cell(&outcome),
            cell(&row.why),
        ]);
    }
    text_of(&table)
}

/// The JSON output of `verify`.
#[derive(Serialize)]
struct Verdict {
    is_whole: bool,
    files: u64,
    records: u64,
    first: Option<u64>,
    head: Option<String>,
    troubles: Vec<Place>,
    more_troubles: u64,
    remarks: Vec<Place>,
}

#[derive(Serialize)]
struct Place {
    file: String,
    line: u64,
    sequence: Option<u64>,
    text: String,
}

impl<T: ToString> From<&Finding<T>> for Place {
    fn from(finding: &Finding<T>) -> Self {
        Self {
            file: finding.file.clone(),
            line: finding.line,
            sequence: finding.sequence,
            text: finding.what.to_string(),
        }
    }
}

fn verify(arguments: &VerifyArguments, format: Format) -> Result<Output, ReadError> {
    let mut verifier = Verifier::new(arguments.expect_head.clone());
    read(open_files(&arguments.files)?, |path, line| match line {
        None => verifier.file(&path.display().to_string()),
        Some(line) => verifier.line(line),
    })?;
    let found = verifier.finish();
    let verdict = Verdict {
        is_whole: found.is_whole(),
        files: found.files,
        records: found.records,
        first: found.first,
        head: found.head.map(|head| head.to_string()),
        troubles: found.troubles.iter().map(Place::from).collect(),
        more_troubles: found.more,
        remarks: found.remarks.iter().map(Place::from).collect(),
    };
    let text = format.render(&verdict, |_| verdict_text(&found));
    let code = if found.is_whole() { EXIT_DONE } else { EXIT_FAILED };
    Ok(Output { text, code })
}

fn verdict_text(found: &ChainReport) -> String {
    let mut text = String::new();
    for trouble in &found.troubles {
        text.push_str(&format!("BROKEN: {trouble}\n"));
    }
    if found.more > 0 {
        text.push_str(&format!("BROKEN: {} more\n", found.more));
    }
    for remark in &found.remarks {
        text.push_str(&format!("note: {remark}\n"));
    }
    let (files, records) = (counted(found.files, "file"), counted(found.records, "record"));
    let state = if found.is_whole() { "whole" } else { "BROKEN" };
    text.push_str(&format!("{state}: {records} in {files}\n"));
    if let Some(head) = found.head {
        text.push_str(&format!("head: {head}\n"));
    }
    text
}
