//! The output of a task in files: `log`, and those that were put aside, `log.1` being the last.
//!
//! What cannot be written is lost: a full disk must not stop a task.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ::tasks::file::Output;

const NAME: &str = "log";

/// The log of a task, which one process writes.
#[derive(Debug)]
pub struct LogFiles {
    directory: PathBuf,
    bytes_max: u64,
    keep: u32,
    file: Option<File>,
    length: u64,
}

impl LogFiles {
    /// Opens the log in `directory`.
    #[must_use]
    pub fn open(directory: &Path, output: &Output) -> Self {
        let bytes_max = u64::from(output.rotate_kib) << 10;
        let mut log = Self {
            directory: directory.to_owned(),
            bytes_max,
            keep: output.keep,
            file: None,
            length: 0,
        };
        log.reopen();
        log
    }

    /// Writes what the task has written.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.length > 0 && self.length + bytes.len() as u64 > self.bytes_max {
            self.put_aside();
        }
        if self.file.is_none() {
            self.reopen();
        }
        if let Some(file) = &mut self.file {
            match file.write_all(bytes) {
                Ok(()) => self.length += bytes.len() as u64,
                // It is opened again for the next lines.
                Err(_) => self.file = None,
            }
        }
    }

    fn reopen(&mut self) {
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o600).open(self.path(0)).ok();
        let length = file.as_ref().and_then(|file| file.metadata().ok());
        self.length = length.map_or(0, |metadata| metadata.len());
        self.file = file;
    }

    fn put_aside(&mut self) {
        self.file = None;
        for number in (0..self.keep).rev() {
            // Some are not there yet.
            let _absent = std::fs::rename(self.path(number), self.path(number + 1));
        }
        if self.keep == 0 {
            let _absent = std::fs::remove_file(self.path(0));
        }
        self.reopen();
    }

    fn path(&self, number: u32) -> PathBuf {
        path(&self.directory, number)
    }
}

fn path(directory: &Path, number: u32) -> PathBuf {
    match number {
        0 => directory.join(NAME),
        number => directory.join(format!("{NAME}.{number}")),
    }
}

/// Returns the last `bytes_max` bytes of the log in `directory`, from a beginning of a line; also
/// from the file that was put aside last, if the present one is short.
pub fn tail(directory: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut is_cut = false;
    for number in [0, 1] {
        let left = bytes_max.saturating_sub(text.len() as u64);
        let mut file = match File::open(path(directory, number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            file => file?,
        };
        let length = file.metadata()?.len();
        is_cut = length > left;
        file.seek(SeekFrom::Start(length.saturating_sub(left)))?;
        let mut part = Vec::new();
        file.take(left).read_to_end(&mut part)?;
        part.append(&mut text);
        text = part;
        if is_cut {
            break;
        }
    }
    if is_cut && let Some(end) = text.iter().position(|byte| *byte == b'\n') {
        text.drain(..=end);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_is_put_aside_and_old_ones_are_gone() {
        let place = tempfile::tempdir().unwrap();
        let output = Output { rotate_kib: 1, keep: 2, ..Output::default() };
        let line = |number: u8| [vec![number; 699], vec![b'\n']].concat();
        for number in b'a'..=b'e' {
            // Each opens it again, as after a restart of the task.
            LogFiles::open(place.path(), &output).write(&line(number));
        }
        let mut names: Vec<_> = std::fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["log", "log.1", "log.2"]);
        assert_eq!(std::fs::read(place.path().join("log.2")).unwrap(), line(b'c'));
        assert_eq!(tail(place.path(), 1_400).unwrap(), [line(b'd'), line(b'e')].concat());
        assert_eq!(tail(place.path(), 1_000).unwrap(), line(b'e'));
        assert_eq!(tail(&place.path().join("absent"), 10).unwrap(), b"");
    }
}
