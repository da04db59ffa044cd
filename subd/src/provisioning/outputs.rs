//! The files with outputs for the programs of the machine: `/run/dominator/resources/ID.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, fchown};
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use provisioning::machine::Outputs;

use crate::tasks::stage::Account;

/// Where they are, below the root.
const DIRECTORY: &str = "run/dominator/resources";

/// Makes the files of `outputs` by id in `root`, each for one user alone, and removes others. A
/// file whose user is not known is for root until the next call.
pub fn write(root: &Path, outputs: &BTreeMap<String, Outputs>) -> io::Result<()> {
    let directory = root.join(DIRECTORY);
    if outputs.is_empty() && !directory.exists() {
        return Ok(());
    }
    let mut made: PathBuf = root.to_owned();
    for part in Path::new(DIRECTORY) {
        made.push(part);
        match fs_err::symlink_metadata(&made) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(io::Error::other(format!("{} is no directory", made.display()))),
            Err(_) => std::fs::DirBuilder::new().mode(0o755).create(&made)?,
        }
    }
    let mut names = BTreeSet::new();
    for (id, Outputs { values, reader }) in outputs {
        let name = format!("{id}.json");
        let text = format!("{values:#}\n");
        let owner = owner(root, id, reader.as_deref());
        let path = directory.join(&name);
        let is_there = fs_err::symlink_metadata(&path).is_ok_and(|one| {
            (one.uid(), one.gid(), one.mode() & 0o7777) == (owner.0, owner.1, 0o600)
        }) && fs_err::read(&path).ok().as_deref() == Some(text.as_bytes());
        if !is_there {
            let new = directory.join(format!(".{name}.new"));
            let _former = fs_err::remove_file(&new);
            let mut options = fs_err::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(text.as_bytes())?;
            fchown(&file, Some(owner.0), Some(owner.1))?;
            fs_err::rename(&new, &path)?;
        }
        names.insert(name);
    }
    for entry in fs_err::read_dir(&directory)? {
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(|name| names.contains(name)) {
            fs_err::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The numbers of the user and the group of `reader`.
fn owner(root: &Path, id: &str, reader: Option<&str>) -> (u32, u32) {
    let Some(user) = reader else { return (0, 0) };
    match Account::find(root, user, &[]) {
        Ok(account) => (account.user.as_raw(), account.group.as_raw()),
        Err(why) => {
            tracing::warn!(resource = id, why, "only root can read the outputs of a resource");
            (0, 0)
        }
    }
}
