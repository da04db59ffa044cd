//! The directories that units and tmpfiles.d name.
// tidy: core

use model::path::TreePath;

use super::DIRECTORIES_MAX;
use crate::packages::printable;

/// What a directory is to the service that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has data of the service; systemd makes it when the service starts.
    Data,
    /// It is made when the machine boots.
    Created {
        /// True if it does not belong to root, or has files that are removed when they are old.
        is_private: bool,
    },
    /// The service does not start without it.
    Needed,
}

/// A directory that is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDirectory {
    pub path: TreePath,
    /// The unit or the file that names it.
    pub by: String,
    pub role: Role,
}

/// Adds the directories that a unit names. Those whose names depend on the machine are skipped.
pub fn in_unit(path: &TreePath, text: &str, named: &mut Vec<NamedDirectory>) {
    let is_change = path.parent().is_some_and(|parent| parent.name().ends_with(b".d"));
    let unit = if is_change { path.parent().unwrap_or_else(TreePath::root) } else { path.clone() };
    let name = printable(&String::from_utf8_lossy(unit.name()));
    let by = name.strip_suffix(".d").unwrap_or(&name).to_owned();
    let settings = || {
        let lines = text.lines().filter_map(|line| line.split_once('='));
        lines.map(|(key, value)| (key.trim(), value.trim()))
    };
    let is_dynamic = settings()
        .any(|(key, value)| key == "DynamicUser" && ["yes", "true", "on", "1"].contains(&value));
    for (key, value) in settings() {
        let words = value.split_whitespace();
        match key {
            "StateDirectory" => {
                for word in words {
                    let (word, _) = word.split_once(':').unwrap_or((word, ""));
                    add(named, &format!("/var/lib/{word}"), &by, Role::Data);
                    if is_dynamic {
                        // The first path is then a symlink to this one.
                        add(named, &format!("/var/lib/private/{word}"), &by, Role::Data);
                    }
                }
            }
            "ReadWritePaths" | "WorkingDirectory" => {
                words.for_each(|word| add(named, word, &by, Role::Needed));
            }
            _ => {}
        }
    }
}

/// Adds the directories that a file of tmpfiles.d makes.
pub fn in_tmpfiles(path: &TreePath, text: &str, named: &mut Vec<NamedDirectory>) {
    let by = path.to_string();
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let (Some(kind), Some(directory)) = (fields.next(), fields.next()) else { continue };
        if !kind.starts_with(['d', 'D', 'v', 'q', 'Q']) {
            continue;
        }
        let [_mode, user, group, age] = std::array::from_fn(|_| fields.next().unwrap_or("-"));
        let is_roots = |who: &str| ["-", "root", "0"].contains(&who.trim_start_matches(':'));
        let is_private = !is_roots(user) || !is_roots(group) || age != "-";
        add(named, directory, &by, Role::Created { is_private });
    }
}

/// Adds a directory, unless there are more than are wanted already.
fn add(named: &mut Vec<NamedDirectory>, path: &str, by: &str, role: Role) {
    // A `-` before a path says that it may be missing.
    if path.contains('%') || path.starts_with('-') || named.len() > DIRECTORIES_MAX {
        return;
    }
    let path = path.trim_start_matches('+');
    let trimmed = path.strip_suffix('/').filter(|rest| !rest.is_empty()).unwrap_or(path);
    if let Ok(path) = TreePath::new(trimmed) {
        named.push(NamedDirectory { path, by: by.to_owned(), role });
    }
}
