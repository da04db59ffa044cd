//! The packages that are installed in an image, from the package databases in its tree.
//!
//! The databases are read from the image server after the upload, so that the source of the image
//! does not matter. Their content is not trusted: its size is limited, and it is used only as text
//! for people.
// tidy: core

mod databases;
pub mod fetch;
mod sqlite;

use std::collections::BTreeMap;

use model::display::safe_text;
use model::image::Package;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Child, Leaf, Tree};

use crate::output::size;

/// Largest total size of the databases of an image, in bytes.
pub const DATABASES_BYTES_MAX: u64 = 128 << 20;

/// Most database files: distroless images have one for each package.
const FILES_MAX: usize = 10_000;

/// Most packages of one image.
const PACKAGES_MAX: usize = 50_000;

/// Longest package list of an image, in bytes; a quarter of what the notes of an image may have.
const LIST_BYTES_MAX: usize = 4 << 20;

/// Longest name or version that is shown, in bytes.
const WORD_BYTES_MAX: usize = 256;

/// Format of a package database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Dpkg,
    Apk,
    Rpm,
}

/// Supported databases: files, or directories of files.
const DATABASES: [(&str, Format); 6] = [
    ("/var/lib/dpkg/status", Format::Dpkg),
    ("/var/lib/dpkg/status.d", Format::Dpkg),
    ("/lib/apk/db/installed", Format::Apk),
    ("/usr/lib/apk/db/installed", Format::Apk),
    ("/var/lib/rpm/rpmdb.sqlite", Format::Rpm),
    ("/usr/lib/sysimage/rpm/rpmdb.sqlite", Format::Rpm),
];

/// Databases that are not supported.
const FOREIGN: [&str; 5] = [
    "/var/lib/rpm/Packages",
    "/var/lib/rpm/Packages.db",
    "/usr/lib/sysimage/rpm/Packages.db",
    "/usr/lib/sysimage/rpm/Packages",
    "/var/lib/pacman/local",
];

/// Packages that cannot be listed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackagesError {
    #[error(
        "unsupported package database {path}: supported are those of dpkg, apk, and rpm with SQLite"
    )]
    Foreign { path: TreePath },
    #[error("rpm was interrupted: {path} has changes that are not in the database yet")]
    Unfinished { path: TreePath },
    #[error("a database is damaged: {why}")]
    Damaged { why: String },
    #[error("the databases have {}: at most {} are read", size(*bytes), size(DATABASES_BYTES_MAX))]
    TooLong { bytes: u64 },
    #[error("the databases have more than {FILES_MAX} files")]
    TooManyFiles,
    #[error(
        "there are more than {PACKAGES_MAX} packages, or their list is longer than {}",
        size(LIST_BYTES_MAX as u64)
    )]
    TooMany,
}

/// Makes a name or version printable. It is not trusted.
pub fn printable(text: &str) -> String {
    safe_text(text, WORD_BYTES_MAX)
}

/// A file of a package database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseFile {
    pub object: ObjectId,
    pub size_bytes: u64,
    format: Format,
}

impl DatabaseFile {
    /// Returns the only file of a database of rpm.
    pub fn of_rpm(content: &[u8]) -> Self {
        let object = model::object::Algorithm::Blake3.digest(content);
        Self { object, size_bytes: content.len() as u64, format: Format::Rpm }
    }
}

/// Returns the database files of `tree`; none if it has no database.
///
/// # Errors
///
/// [`PackagesError`] if the database is unsupported or too large.
pub fn database_files(tree: &Tree) -> Result<Vec<DatabaseFile>, PackagesError> {
    let path = |text: &str| TreePath::new(text).expect("the table has paths");
    let mut database_files = Vec::new();
    for (text, format) in DATABASES {
        let changes = path(&format!("{text}-wal"));
        if format == Format::Rpm && tree.file(&changes).is_some_and(|file| file.size_bytes > 0) {
            return Err(PackagesError::Unfinished { path: changes });
        }
        let mut add = |path: &TreePath| {
            if let Some(file) = tree.file(path) {
                database_files.push(DatabaseFile {
                    object: file.object.id(),
                    size_bytes: file.size_bytes,
                    format,
                });
            }
        };
        match tree.get(&path(text)) {
            Some(Child::Directory(directory)) => {
                for entry in directory.entries() {
                    // Each package has a second file with the digests of its files.
                    let is_digests = entry.name.as_bytes().ends_with(b".md5sums");
                    if matches!(&entry.child, Child::Leaf(Leaf::File(_))) && !is_digests {
                        let name = entry.name.as_bytes();
                        add(&path(text).join(name).expect("a name of a directory is one"));
                    }
                }
            }
            Some(Child::Leaf(_)) => add(&path(text)),
            None => {}
        }
    }
    if database_files.len() > FILES_MAX {
        return Err(PackagesError::TooManyFiles);
    }
    let bytes = database_files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.size_bytes));
    if bytes > DATABASES_BYTES_MAX {
        return Err(PackagesError::TooLong { bytes });
    }
    if database_files.is_empty()
        && let Some(text) = FOREIGN.into_iter().find(|text| tree.get(&path(text)).is_some())
    {
        return Err(PackagesError::Foreign { path: path(text) });
    }
    Ok(database_files)
}

/// A package in a database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RawPackage {
    name: String,
    version: String,
    architecture: String,
    size_bytes: u64,
}

/// Reads the packages of `database_files`, given with their contents; sorted by name and version.
pub fn packages<'a>(
    database_files: impl IntoIterator<Item = (&'a DatabaseFile, &'a [u8])>,
) -> Result<Vec<Package>, PackagesError> {
    let mut found = Vec::new();
    for (file, content) in database_files {
        let mut note = |package: RawPackage| {
            found.push(package);
            found.len() <= PACKAGES_MAX
        };
        let all = match file.format {
            Format::Dpkg => databases::read_dpkg(content, &mut note),
            Format::Apk => databases::read_apk(content, &mut note),
            Format::Rpm => databases::read_rpm(content, &mut note)
                .map_err(|error| PackagesError::Damaged { why: error.to_string() })?,
        };
        if !all {
            return Err(PackagesError::TooMany);
        }
    }
    let native = native(&found);
    let mut packages: Vec<Package> = found.iter().map(|one| package(one, &native)).collect();
    packages.sort_by(|left, right| (&left.name, &left.version).cmp(&(&right.name, &right.version)));
    packages.dedup();
    let bytes = packages.iter().fold(0, |sum, one| sum + one.name.len() + one.version.len() + 16);
    if bytes > LIST_BYTES_MAX { Err(PackagesError::TooMany) } else { Ok(packages) }
}

/// Returns the architecture that most packages have. It is not shown.
fn native(found: &[RawPackage]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for one in found.iter().filter(|one| !is_any(&one.architecture)) {
        *counts.entry(&one.architecture).or_default() += 1;
    }
    let most = counts.into_iter().max_by(|(left, left_count), (right, right_count)| {
        left_count.cmp(right_count).then_with(|| right.cmp(left))
    });
    most.map(|(architecture, _)| architecture.to_owned()).unwrap_or_default()
}

fn is_any(architecture: &str) -> bool {
    matches!(architecture, "" | "all" | "noarch")
}

fn package(found: &RawPackage, native: &str) -> Package {
    let RawPackage { name, version, architecture, size_bytes } = found;
    let name = match architecture {
        architecture if is_any(architecture) || architecture == native => name.clone(),
        architecture => format!("{name}:{architecture}"),
    };
    Package { name: printable(&name), version: printable(version), size_bytes: *size_bytes }
}

#[cfg(test)]
mod tests;
