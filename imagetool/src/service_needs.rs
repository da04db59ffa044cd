//! What the services of an image need that its filter, or another numbering of users, would take
//! from them.
//!
//! Services keep data in directories that they own, or that their units and tmpfiles.d name. What
//! they write there is removed from machines as drift unless the filter keeps it. A directory that
//! the filter keeps as a whole is not in the image, so that a machine that lacks it never gets it.
//! Kept files have the numbers of users that the former image had.
// tidy: core

pub mod named;

use std::collections::BTreeMap;

use model::accounts::{AccountKind, Accounts, ChangedNumber, ids};
use model::display::size;
use model::filter::Filter;
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::Leaf;
use model::tree::encode::Item;

use self::named::{NamedDirectory, Role};
use crate::directory_cache::{DirectoryCache, Lookup};
use crate::image_checks::Warnings;
use crate::packages::printable;

/// Directories below which services keep data that is not in packages.
const DATA: [&str; 3] = ["/var/lib", "/var/spool", "/srv"];

/// Directories below which services need directories that packages bring.
const NEEDED: [&str; 5] = ["/var/cache", "/var/lib", "/var/log", "/var/spool", "/srv"];

/// Directories of units, each below its directory of settings.
const UNITS: [&str; 3] = ["/etc/systemd/system", "/lib/systemd/system", "/usr/lib/systemd/system"];

/// Directories of tmpfiles.d.
const TMPFILES: [&str; 2] = ["/etc/tmpfiles.d", "/usr/lib/tmpfiles.d"];

/// Longest unit, tmpfiles.d file, or list of users that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Most files that are read.
const FILES_MAX: usize = 10_000;

/// How much is read of all files, in bytes.
const ALL_BYTES_MAX: u64 = 16 << 20;

/// Most directories that are taken from units and tmpfiles.d.
const DIRECTORIES_MAX: usize = 10_000;

/// How many directories or users a warning names.
const NAMED_MAX: usize = 20;

/// A directory of the source that the filter keeps, so that the image does not have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedDirectory {
    pub path: TreePath,
    pub uid: u32,
    pub gid: u32,
}

/// What a file means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    Unit,
    Tmpfiles,
    Users,
    Groups,
}

/// A file that says what services need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeedsFile {
    pub path: TreePath,
    pub meaning: Meaning,
    pub object: ObjectId,
    pub size_bytes: u64,
}

/// What a tree has of services, before files are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    pub files: Vec<NeedsFile>,
    /// The topmost directories that do not belong to root alone, with owner and group.
    owned: Vec<(TreePath, u32, u32)>,
    /// The size of all files.
    bytes: u64,
    /// True if files were left out, because they or all of them are too large.
    is_partial: bool,
}

fn constant(text: &str) -> TreePath {
    TreePath::new(text).expect("the constants are paths")
}

impl Survey {
    /// Looks through the tree of `root`; incomplete while the cache wants directories.
    pub fn of(cache: &mut DirectoryCache, root: ObjectId) -> Self {
        let mut survey = Self::of_accounts(cache, root);
        for (texts, meaning) in [(&UNITS[..], Meaning::Unit), (&TMPFILES[..], Meaning::Tmpfiles)] {
            for text in texts {
                if let Lookup::Directory(id) = cache.find(root, &constant(text)) {
                    survey.add_files(cache, &constant(text), id, meaning);
                }
            }
        }
        for text in DATA {
            if let Lookup::Directory(id) = cache.find(root, &constant(text)) {
                survey.add_owned(cache, &constant(text), id);
            }
        }
        survey
    }

    /// Finds only the lists of users and groups.
    pub fn of_accounts(cache: &mut DirectoryCache, root: ObjectId) -> Self {
        let mut survey = Self::default();
        for (text, meaning) in [("/etc/passwd", Meaning::Users), ("/etc/group", Meaning::Groups)] {
            if let Lookup::Leaf(leaf) = cache.find(root, &constant(text)) {
                survey.add_file(constant(text), &leaf, meaning);
            }
        }
        survey
    }

    fn add_file(&mut self, path: TreePath, leaf: &Leaf, meaning: Meaning) {
        let Leaf::File(file) = leaf else { return };
        let (object, size_bytes) = (file.object.id(), file.size_bytes);
        let bytes = self.bytes.saturating_add(size_bytes);
        if size_bytes > FILE_BYTES_MAX || bytes > ALL_BYTES_MAX || self.files.len() == FILES_MAX {
            self.is_partial = true;
            return;
        }
        self.bytes = bytes;
        self.files.push(NeedsFile { path, meaning, object, size_bytes });
    }

    /// Adds the files of a directory; of units also those in `NAME.d`, which change them.
    fn add_files(
        &mut self,
        cache: &mut DirectoryCache,
        at: &TreePath,
        id: ObjectId,
        meaning: Meaning,
    ) {
        let Some(listing) = cache.get(id) else { return };
        for (name, item) in &listing.entries {
            let Ok(path) = at.join(name.as_bytes()) else { continue };
            match item {
                Item::Leaf(leaf) => self.add_file(path, leaf, meaning),
                Item::Directory(below) if name.as_bytes().ends_with(b".d") => {
                    self.add_files(cache, &path, *below, meaning);
                }
                Item::Directory(_) => {}
            }
        }
    }

    /// Adds the topmost directories below `at` that do not belong to root alone.
    fn add_owned(&mut self, cache: &mut DirectoryCache, at: &TreePath, id: ObjectId) {
        let Some(listing) = cache.get(id) else { return };
        for (name, item) in &listing.entries {
            let (Item::Directory(below), Ok(path)) = (item, at.join(name.as_bytes())) else {
                continue;
            };
            let Some(inside) = cache.get(*below) else { continue };
            match (inside.metadata.uid, inside.metadata.gid) {
                (0, 0) => self.add_owned(cache, &path, *below),
                (uid, gid) => self.owned.push((path, uid, gid)),
            }
        }
    }
}

/// The contents of the files of a survey.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub accounts: Accounts,
    named: Vec<NamedDirectory>,
}

impl Needs {
    /// Reads the contents of `files`. They are not trusted: what is not understood is skipped.
    pub fn read<'a>(files: impl IntoIterator<Item = (&'a NeedsFile, &'a [u8])>) -> Self {
        let mut needs = Self::default();
        for (file, content) in files {
            let text = String::from_utf8_lossy(content);
            match file.meaning {
                Meaning::Unit => named::in_unit(&file.path, &text, &mut needs.named),
                Meaning::Tmpfiles => named::in_tmpfiles(&file.path, &text, &mut needs.named),
                Meaning::Users => needs.accounts.users = ids(&text),
                Meaning::Groups => needs.accounts.groups = ids(&text),
            }
        }
        needs
    }
}

/// Warns if not everything was looked at.
pub fn partial_warning(survey: &Survey, needs: &Needs) -> Warnings {
    if !survey.is_partial && needs.named.len() <= DIRECTORIES_MAX {
        return Warnings::default();
    }
    let text = format!(
        "not all units and files of tmpfiles.d were looked at: at most {FILES_MAX} files of {}, {} \
         together, that name {DIRECTORIES_MAX} directories",
        size(FILE_BYTES_MAX),
        size(ALL_BYTES_MAX)
    );
    Warnings { warnings: vec![text], filter_lines: Vec::new() }
}

/// Directories with data that machines would lose, each with who writes there and the line of a
/// filter that keeps the data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostData(BTreeMap<TreePath, (String, String)>);

/// Finds the data that machines would lose. `find` finds a path of the tree.
pub fn lost_data(
    survey: &Survey,
    needs: &Needs,
    filter: &Filter,
    mut find: impl FnMut(&TreePath) -> Found,
) -> LostData {
    let mut lost: BTreeMap<TreePath, (String, String)> = BTreeMap::new();
    let mut add = |path: &TreePath, by: String, found: Found| {
        if !is_below(path, &DATA) || is_thought_of(filter, path, found) {
            return;
        }
        let end = if found == Found::Absent { "$" } else { "/.*" };
        lost.entry(path.clone()).or_insert((by, line_of(path, end)));
    };
    for (path, uid, gid) in &survey.owned {
        add(path, owner_name(&needs.accounts, *uid, *gid), Found::Filled);
    }
    for named in &needs.named {
        let found = find(&named.path);
        let is_data = match named.role {
            Role::Data => true,
            Role::Created { is_private } => is_private || found != Found::Filled,
            Role::Needed => false,
        };
        if is_data {
            add(&named.path, named.by.clone(), found);
        }
    }
    let mut top: Option<TreePath> = None;
    lost.retain(|path, _| {
        let is_below = top.as_ref().is_some_and(|top| path.starts_with(top));
        if !is_below {
            top = Some(path.clone());
        }
        !is_below
    });
    LostData(lost)
}

impl LostData {
    /// Warns of what is lost and was not lost `before`.
    pub fn warnings(mut self, before: &Self) -> Warnings {
        self.0.retain(|path, _| !before.0.contains_key(path));
        if self.0.is_empty() {
            return Warnings::default();
        }
        let shown = self.0.iter().map(|(path, (by, _))| format!("{path} ({by})"));
        let text = format!(
            "services keep data in directories whose content the filter does not keep, so that it \
             would be removed from machines: {}",
            listed(shown)
        );
        let filter_lines = self.0.into_values().map(|(_, line)| line).collect();
        Warnings { warnings: vec![text], filter_lines }
    }
}

/// Warns of directories that services need, and that the filter leaves out of the image. Who owns
/// the directory above can make them again. `owner` finds the owner and group of a directory.
pub fn dropped_warnings(
    dropped: &[DroppedDirectory],
    needs: &Needs,
    mut owner: impl FnMut(&TreePath) -> Option<(u32, u32)>,
) -> Warnings {
    let mut missing: BTreeMap<&TreePath, (String, String)> = BTreeMap::new();
    for one in dropped.iter().filter(|one| is_below(&one.path, &NEEDED)) {
        let named = needs.named.iter().find(|named| named.path == one.path);
        let by = match named {
            // systemd makes these when the service starts.
            Some(NamedDirectory { role: Role::Data, .. }) => continue,
            Some(named) => named.by.clone(),
            None if (one.uid, one.gid) == (0, 0) => continue,
            None if one.path.parent().and_then(|up| owner(&up)) == Some((one.uid, one.gid)) => {
                continue;
            }
            None => owner_name(&needs.accounts, one.uid, one.gid),
        };
        missing.insert(&one.path, (by, line_of(&one.path, "/.*")));
    }
    if missing.is_empty() {
        return Warnings::default();
    }
    let shown = missing.iter().map(|(path, (by, _))| format!("{path} ({by})"));
    let text = format!(
        "the filter leaves out directories that services need, so that a machine without them \
         does not get them: {}",
        listed(shown)
    );
    let lines = listed(missing.values().map(|(_, line)| line.clone()));
    let advice = format!("{text}; keep only what is in them, by lines such as {lines}");
    Warnings { warnings: vec![advice], filter_lines: Vec::new() }
}

/// Warns of users and groups that have other numbers than in the image `former`.
pub fn renumbered_warning(
    accounts: &Accounts,
    former: &Accounts,
    name: &ImageName,
    filter: &Filter,
) -> Warnings {
    let moved = |change: ChangedNumber| {
        let (what, old, name) = (change.kind.name(), change.number, printable(&change.former));
        change.moved_to.map(|new| format!("{what} {name}: {old} to {new}"))
    };
    let changes: Vec<String> =
        accounts.changed_numbers(former).into_iter().filter_map(moved).collect();
    if changes.is_empty() || filter.lines().is_empty() {
        return Warnings::default();
    }
    let text = format!(
        "if machines go from {name} to this, files that they keep have the old numbers of users \
         and groups: {}; make the root with the numbers of {name}",
        listed(changes.into_iter())
    );
    Warnings { warnings: vec![text], filter_lines: Vec::new() }
}

/// Names the owner of an entry: the user, or the group if the user is root.
fn owner_name(accounts: &Accounts, uid: u32, gid: u32) -> String {
    let (kind, ids, wanted) = match uid {
        0 => (AccountKind::Group, &accounts.groups, gid),
        _ => (AccountKind::User, &accounts.users, uid),
    };
    let what = kind.name();
    match ids.iter().find(|(_, id)| **id == wanted) {
        Some((name, _)) => format!("{what} {}", printable(name)),
        None => format!("{what} {wanted}"),
    }
}

/// Finds the owner and group of a directory in the tree of `root`.
pub fn owner(cache: &mut DirectoryCache, root: ObjectId, path: &TreePath) -> Option<(u32, u32)> {
    let Lookup::Directory(id) = cache.find(root, path) else { return None };
    cache.get(id).map(|listing| (listing.metadata.uid, listing.metadata.gid))
}

/// What is at a path of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Absent,
    /// A directory without entries.
    Empty,
    Filled,
}

impl Found {
    /// Finds `path` in the tree of `root`.
    pub fn at(cache: &mut DirectoryCache, root: ObjectId, path: &TreePath) -> Self {
        match cache.find(root, path) {
            Lookup::Absent => Self::Absent,
            Lookup::Directory(id) => match cache.get(id) {
                Some(listing) if listing.entries.is_empty() => Self::Empty,
                _ => Self::Filled,
            },
            Lookup::NotFetched | Lookup::Leaf(_) => Self::Filled,
        }
    }
}

/// True if `path` is below one of `directories`, and none of them.
fn is_below(path: &TreePath, directories: &[&str]) -> bool {
    directories.iter().any(|text| *path != constant(text) && path.starts_with(&constant(text)))
}

/// True if the filter keeps what is written at `path`, or has a line about something in it: then
/// its maker has decided.
fn is_thought_of(filter: &Filter, path: &TreePath, found: Found) -> bool {
    let below = path.join(b"x");
    let keeps = match found {
        Found::Absent => filter.keeps(path),
        Found::Empty | Found::Filled => below.is_ok_and(|below| filter.keeps(&below)),
    };
    let starts = [format!("{path}/"), line_of(path, "/")];
    keeps || filter.lines().iter().any(|line| starts.iter().any(|start| line.starts_with(start)))
}

/// Returns the line of a filter for `path`, which ends with `end`.
fn line_of(path: &TreePath, end: &str) -> String {
    let mut line = String::new();
    for character in path.to_string().chars() {
        if "\\.+*?()|[]{}^$".contains(character) {
            line.push('\\');
        }
        line.push(character);
    }
    line + end
}

fn listed(shown: impl ExactSizeIterator<Item = String>) -> String {
    let more = if shown.len() > NAMED_MAX { ", ..." } else { "" };
    let named: Vec<String> = shown.take(NAMED_MAX).collect();
    named.join(", ") + more
}

#[cfg(test)]
mod tests;
