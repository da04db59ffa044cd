//! `domtool audit show` and `verify`: what the files of an audit log tell, and whether they are
//! what the daemon wrote.

mod rows;

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use api::audit::record::{self, stamp};
use api::audit::verify::{Expected, Finding, Report, Verifier};
use clap::{Args, Subcommand};
use daemon::{EXIT_DONE, EXIT_FAILED, exit};
use model::report::report;
use model::tree::Time;
use model::words::{counted, plain};
use rpc::audit_log::{files_of, read_line};
use serde::Serialize;
use tool::{Format, Output, json};

use super::columns;
use rows::{Row, Rows, Wanted};
use system::clock::past;

/// How often the files are listed again when they change while they are opened.
const LIST_TRIES: usize = 5;

/// The longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 200;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show what the files of an audit log tell, the newest last
    #[command(after_help = "Examples:\n  \
        domtool audit show /var/lib/imageserver/audit/audit.log --since 2d\n  \
        domtool audit show /.subd/audit/audit.log --method 'Subd.Commit' --format json\n\n\
        Of a call whose outcome is `unknown` no end is on record: it runs, its caller went away,\n\
        or the daemon was killed. It may have been done or not.")]
    Show(Show),
    /// Say whether the files of an audit log are what the daemon wrote
    ///
    /// Each record carries the hash of the one before it. Said is where records were changed,
    /// removed, added or moved. That the end was cut off, or all written anew from some record on,
    /// shows only against a head that was remembered elsewhere: daemons log it every hour, and show
    /// it at /audit and in /metrics. Exits with 1 if anything is broken.
    #[command(after_help = "Examples:\n  \
        domtool audit verify /var/lib/dominator/audit/audit.log\n  \
        domtool audit verify audit.log --expect-head 4711:56f87f68f05d")]
    Verify(Verify),
}

#[derive(Debug, Args)]
pub(super) struct Show {
    /// The file that the daemon writes; those before it are read, too
    #[arg(value_name = "FILE", default_value = "/var/lib/dominator/audit/audit.log")]
    files: Vec<PathBuf>,
    /// Only what was asked for since then: 12h or 1d ago, or 18:30 or 2030-01-31T18:30
    #[arg(long, value_name = "TIME|DURATION", value_parser = past)]
    since: Option<Time>,
    /// Only what was asked for until then
    #[arg(long, value_name = "TIME|DURATION", value_parser = past)]
    until: Option<Time>,
    /// Only what this user asked for, by the certificate or by their own word
    #[arg(long, value_name = "USER")]
    user: Vec<String>,
    /// Only calls of such methods: `*` is anything
    #[arg(long, value_name = "PATTERN")]
    method: Vec<String>,
    /// How many calls at most, the newest; 0 for all
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    limit: usize,
}

#[derive(Debug, Args)]
pub(super) struct Verify {
    /// The file that the daemon writes; those before it are read, too
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// A head that was seen before: that record must be there still, and be the same; may be given
    /// several times
    #[arg(long, value_name = "SEQUENCE:HASH")]
    expect_head: Vec<Expected>,
}

/// A file that cannot be read.
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
            Self::None { .. } => &["each daemon has it where it keeps what it remembers, in \
                 audit/audit.log; --audit-log of the daemon says otherwise"],
        }
    }
}

/// Carries out `command`, which needs no daemon.
pub(super) fn run(command: &Command, format: Format) -> ExitCode {
    let done = match command {
        Command::Show(arguments) => show(arguments, format),
        Command::Verify(arguments) => verify(arguments, format),
    };
    match done {
        Ok(output) => output.print(),
        Err(error) => exit(EXIT_FAILED, &report(&error), error.hints()),
    }
}

/// The files of these logs, open, in the order of their records.
fn opened(paths: &[PathBuf]) -> Result<Vec<(PathBuf, File)>, ReadError> {
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
            let first = first_of(&file).map_err(failed(path))?;
            files.push((first, path.clone(), file));
        }
        // A daemon that begins another file meanwhile gives this one another name.
        let now = list()?;
        if now == before {
            files.sort_by(|(first, path, _), (other, path_of_other, _)| {
                (first, path).cmp(&(other, path_of_other))
            });
            return Ok(files.into_iter().map(|(_, path, file)| (path, file)).collect());
        }
        before = now;
    }
    let source = io::Error::other("the files change all the time");
    Err(failed(&paths[0])(source))
}

/// The number of the first record of a file; the highest if it has none.
fn first_of(file: &File) -> io::Result<u64> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(file.try_clone()?);
    read_line(&mut reader, &mut line)?;
    io::Seek::rewind(&mut &*file)?;
    let opened = line.strip_suffix(b"\n").map(record::open);
    Ok(opened.and_then(Result::ok).map_or(u64::MAX, |sealed| sealed.head.sequence))
}

/// Gives each line of the files to `take`, and the name of each file before.
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

fn show(arguments: &Show, format: Format) -> Result<Output, ReadError> {
    let (mut rows, mut strange) = (Rows::default(), 0);
    read(opened(&arguments.files)?, |_, line| {
        let Some(line) = line else { return };
        let opened = line.strip_suffix(b"\n").map(record::open);
        match opened.and_then(Result::ok).and_then(|sealed| sealed.record) {
            Some(record) => rows.add(record),
            None => strange += 1,
        }
    })?;
    if strange > 0 {
        let lines = counted(strange, "line");
        eprintln!("{lines} cannot be read: domtool audit verify says more");
    }
    let wanted = Wanted {
        since: arguments.since.map(stamp),
        until: arguments.until.map(stamp),
        users: arguments.user.clone(),
        methods: arguments.method.clone(),
    };
    let rows = rows.finish(&wanted, arguments.limit);
    let text = match format {
        Format::Table => table(&rows),
        Format::Json => json(&rows),
    };
    Ok(text.into())
}

fn table(rows: &[Row]) -> String {
    let mut table = columns(&["TIME", "DAEMON", "WHO", "WHAT", "OUTCOME", "WHY"]);
    let cell = |text: &str| plain(text, CELL_BYTES_MAX);
    for row in rows {
        let second = row.time.split('.').next().unwrap_or_default();
        let name = match (row.user.as_str(), row.who.as_str()) {
            ("", "") => "",
            ("", who) => who,
            (user, _) => user,
        };
        let who = match (name, row.address.as_str()) {
            ("", "") => "itself".to_owned(),
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
    format!("{}\n", table.trim_fmt())
}

/// What `verify` says as JSON.
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

fn verify(arguments: &Verify, format: Format) -> Result<Output, ReadError> {
    let mut verifier = Verifier::new(arguments.expect_head.clone());
    read(opened(&arguments.files)?, |path, line| match line {
        None => verifier.file(&path.display().to_string()),
        Some(line) => verifier.line(line),
    })?;
    let found = verifier.finish();
    let text = match format {
        Format::Table => verdict(&found),
        Format::Json => json(&Verdict {
            is_whole: found.is_whole(),
            files: found.files,
            records: found.records,
            first: found.first,
            head: found.head.map(|head| head.to_string()),
            troubles: found.troubles.iter().map(Place::from).collect(),
            more_troubles: found.more,
            remarks: found.remarks.iter().map(Place::from).collect(),
        }),
    };
    let code = if found.is_whole() { EXIT_DONE } else { EXIT_FAILED };
    Ok(Output { text, code })
}

fn verdict(found: &Report) -> String {
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
