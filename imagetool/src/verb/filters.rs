//! `imagetool merge-filters` and `scan-filter`: work on filter files, without a server.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, Table, presets};
use model::filter::Filter;
use model::path::TreePath;
use model::scope::SUBD_DIRECTORY;
use tool::Format;
use walkdir::WalkDir;

use super::{VerbResult, print, print_json};
use crate::input_files::filters::{Counter, FilterUse, Kept, merge, to_text};
use crate::input_files::{parse_filter, read_text};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::{Meter, Unit};
use crate::output::{plural, plural_entries, size};
use model::display::grouped;

/// Merges filters: the result keeps a path if one of them keeps it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  imagetool merge-filters filters/debian filters/web > filter

Lines are sorted, each is there once, and comments are left out: equal sets of lines give equal
files. JSON is an array of the lines. The server is not asked.")]
pub struct MergeFiltersArgs {
    /// Filter files.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

pub fn merge_filters(format: Format, args: &MergeFiltersArgs) -> VerbResult {
    let read = |path: &PathBuf| parse_filter(path, &read_text(path, "filter")?);
    let filters = args.files.iter().map(read).collect::<Result<Vec<_>, Failure>>()?;
    let merged = merge(&filters).map_err(|error| Failure::new(&error))?;
    match format {
        Format::Json => print_json(&merged.lines())?,
        Format::Table => print(&to_text(&merged))?,
    }
    Ok(Outcome::Done)
}

/// Shows what a filter would leave out of a directory, line by line.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool scan-filter filter /srv/build/root
  imagetool scan-filter --list filter / | less      # what of this machine would be kept

PATHS counts what a line matches, ENTRIES also what lies below that. An entry that several lines
keep counts for each of them. Lines that match nothing may be right: what they keep comes into
being on machines. The server is not asked; other file-systems are not entered.")]
pub struct ScanFilterArgs {
    /// A filter file.
    #[arg(value_name = "FILTERFILE")]
    pub filter_file: PathBuf,
    /// Directory as for `add`.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// List the paths too.
    #[arg(long)]
    pub list: bool,
}

pub fn scan_filter(format: Format, meter: &Meter, args: &ScanFilterArgs) -> VerbResult {
    let text = read_text(&args.filter_file, "filter")?;
    let filter = parse_filter(&args.filter_file, &text)?;
    let used = scan(&filter, &args.directory, meter)?;
    match format {
        Format::Json => print_json(&used)?,
        Format::Table => {
            if args.list {
                print(&list(&used))?;
            }
            print(&table(&used))?;
        }
    }
    eprintln!(
        "The filter keeps {} of {}, {}.",
        grouped(used.kept_entries),
        plural_entries(used.entries),
        size(used.kept_bytes)
    );
    let unused: Vec<&str> =
        used.lines.iter().filter(|line| line.entries == 0).map(|line| line.line.as_str()).collect();
    if !unused.is_empty() {
        let number = unused.len() as u64;
        let verb = if number == 1 { "matches" } else { "match" };
        eprintln!("note: {} {verb} nothing: {}", plural(number, "line"), unused.join(", "));
    }
    Ok(Outcome::Done)
}

fn scan(filter: &Filter, root: &Path, meter: &Meter) -> Result<FilterUse, Failure> {
    let failed = |path: &Path, why: String| {
        Failure::from_text(format!("cannot read `{}`: {why}", path.display()))
    };
    // The walk does not follow symlinks, except here.
    let root = std::fs::canonicalize(root).map_err(|error| failed(root, error.to_string()))?;
    let mut counter = Counter::new(filter).map_err(|error| Failure::new(&error))?;
    let mut linked = BTreeSet::new();
    meter.start("Looking for files", Unit::Items, None);
    let path_of = |path: &Path| {
        let relative = path.strip_prefix(&root).unwrap_or(path).as_os_str().as_bytes();
        TreePath::new([b"/", relative].concat()).map_err(|error| failed(path, error.to_string()))
    };
    let entries = WalkDir::new(&root).sort_by_file_name().same_file_system(true).into_iter();
    let own = root.join(SUBD_DIRECTORY.trim_start_matches('/'));
    for entry in entries.filter_entry(|entry| entry.path() != own) {
        let entry = entry.map_err(|error| {
            failed(error.path().unwrap_or(&root), model::display::error_chain(&error))
        })?;
        let status = entry.metadata().map_err(|error| failed(entry.path(), error.to_string()))?;
        let is_first = status.nlink() < 2 || linked.insert((status.dev(), status.ino()));
        let bytes = if status.is_file() && is_first { status.len() } else { 0 };
        counter.add(&path_of(entry.path())?, bytes);
        meter.add(1);
    }
    meter.finish();
    Ok(counter.finish())
}

fn list(used: &FilterUse) -> String {
    let line = |Kept { path, entries, bytes, lines }: &Kept| {
        let by: Vec<&str> = lines.iter().map(|line| used.lines[line - 1].line.as_str()).collect();
        let number = plural_entries(*entries);
        format!("{path}: {number}, {}, by {}\n", size(*bytes), by.join(" "))
    };
    let mut text: String = used.kept.iter().map(line).collect();
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

fn table(used: &FilterUse) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["PATHS", "ENTRIES", "SIZE", "LINE"]);
    for line in &used.lines {
        table.add_row([
            grouped(line.paths),
            grouped(line.entries),
            size(line.bytes),
            line.line.clone(),
        ]);
    }
    for index in [0, 1, 2] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
