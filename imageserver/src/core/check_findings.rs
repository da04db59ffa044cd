//! The findings of `imageserver check`, and their text.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use model::display::{counted, size};
use model::image::ImageName;
use model::object::ObjectId;
use serde::Serialize;

/// The most findings that are listed; more are counted.
const NAMED_MAX: usize = 100_000;

/// The most objects of one image that the text lists.
const SHOWN_MAX: usize = 10;

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A record of an image, intact or not.
    Image,
    /// A tombstone.
    Deleted,
    /// An empty file that a crash has left.
    Empty,
    /// An object whose content does not have the digest of its name.
    Corrupt {
        id: ObjectId,
        /// The length of the object.
        size_bytes: u64,
        /// The file in the quarantine, if it was moved there.
        quarantined: Option<PathBuf>,
    },
    /// An unreadable object.
    Unreadable {
        id: ObjectId,
        /// The error of the kernel.
        error: String,
    },
    /// A damaged record.
    Record {
        name: ImageName,
        /// Why the record cannot be used.
        why: String,
    },
    /// An image with missing objects.
    Incomplete {
        name: ImageName,
        /// The missing objects.
        objects: BTreeSet<ObjectId>,
    },
    /// A deleted name that still has a record.
    DeletedWithRecord(ImageName),
    /// The file of directories is damaged, with the reason.
    Directories(String),
    /// A file that no server has made.
    Unknown(PathBuf),
}

/// An object whose content does not have the digest of its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Corrupt {
    pub object: ObjectId,
    /// The length of the object.
    pub size_bytes: u64,
    /// The file in the quarantine, if it was moved there.
    pub put_aside: Option<String>,
}

/// An image with missing objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct IncompleteImage {
    pub image: ImageName,
    /// The missing objects.
    pub objects: Vec<ObjectId>,
}

/// Everything that a check found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// True if nothing is missing or damaged.
    pub sound: bool,
    /// Objects that were read.
    pub objects: u64,
    /// The length of these objects together, in bytes.
    pub object_bytes: u64,
    /// How long reading took.
    pub reading_seconds: f64,
    /// Images.
    pub images: u64,
    /// Names that were deleted.
    pub deleted_names: u64,
    /// Unfinished uploads, which the next start of a server removes.
    pub unfinished: u64,
    /// Empty files that a crash has left, which the next upload replaces.
    pub empty: u64,
    /// Corrupt objects.
    pub corrupt: Vec<Corrupt>,
    /// Unreadable objects, with the errors of the kernel.
    pub unreadable: BTreeMap<ObjectId, String>,
    /// Images with missing objects.
    pub incomplete: Vec<IncompleteImage>,
    /// Damaged records, with the reasons.
    pub damaged_records: BTreeMap<ImageName, String>,
    /// Deleted names that still have a record, which the next start of a server removes.
    pub revived_names: Vec<ImageName>,
    /// Why the directories cannot be used; `None` if they can.
    pub damaged_directories: Option<String>,
    /// Files that no server has made.
    pub unknown_files: Vec<String>,
    /// How many findings are not listed.
    pub more: u64,
    #[serde(skip)]
    bad: BTreeSet<ObjectId>,
}

impl Findings {
    /// Records `finding`.
    pub fn add(&mut self, finding: Finding) {
        let named = self.corrupt.len()
            + self.unreadable.len()
            + self.unknown_files.len()
            + self.incomplete.len();
        match finding {
            Finding::Image => self.images += 1,
            Finding::Deleted => self.deleted_names += 1,
            Finding::Empty => self.empty += 1,
            _ if named >= NAMED_MAX => self.more += 1,
            Finding::Corrupt { id, size_bytes, quarantined } => {
                self.bad.insert(id);
                let put_aside = quarantined.map(|path| path.display().to_string());
                self.corrupt.push(Corrupt { object: id, size_bytes, put_aside });
            }
            Finding::Unreadable { id, error } => {
                self.bad.insert(id);
                self.unreadable.insert(id, error);
            }
            Finding::Record { name, why } => {
                self.damaged_records.insert(name, why);
            }
            Finding::Incomplete { name, objects } => {
                let objects = objects.into_iter().collect();
                self.incomplete.push(IncompleteImage { image: name, objects });
            }
            Finding::Directories(why) => self.damaged_directories = Some(why),
            Finding::DeletedWithRecord(name) => self.revived_names.push(name),
            Finding::Unknown(path) => self.unknown_files.push(path.display().to_string()),
        }
    }

    /// Returns true if the object was found to be corrupt or unreadable.
    #[must_use]
    pub fn is_bad(&self, id: &ObjectId) -> bool {
        self.bad.contains(id)
    }

    /// Sorts the findings, whichever thread found them first.
    pub fn sort(&mut self) {
        self.corrupt.sort();
        self.incomplete.sort();
        self.revived_names.sort();
        self.unknown_files.sort();
        self.sound = self.corrupt.is_empty()
            && self.unreadable.is_empty()
            && self.incomplete.is_empty()
            && self.damaged_records.is_empty()
            && self.more == 0;
    }

    /// Returns true if there is nothing that wants an operator.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.sound
            && self.revived_names.is_empty()
            && self.damaged_directories.is_none()
            && self.unknown_files.is_empty()
    }

    /// Formats the findings for operators.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, rest: String| {
            writeln!(text, "{name:<11} {rest}").expect("writing to a String cannot fail");
        };
        line("objects", format!("{}, {}{}", self.objects, size(self.object_bytes), self.rate()));
        let deleted = counted(self.deleted_names, "name");
        line("images", format!("{}; {deleted} deleted", self.images));
        if self.unfinished > 0 {
            let uploads = counted(self.unfinished, "unfinished upload");
            line("left over", format!("{uploads}, removed by the next start of the server"));
        }
        if self.empty > 0 {
            let files = counted(self.empty, "empty file");
            line("left over", format!("{files} of a crash, replaced by the next upload"));
        }
        for Corrupt { object, size_bytes, put_aside } in &self.corrupt {
            let quarantined = match put_aside {
                Some(path) => format!("now {path}"),
                None => "--repair puts it aside".to_owned(),
            };
            line("corrupt", format!("{object} ({}); {quarantined}", size(*size_bytes)));
        }
        for (object, error) in &self.unreadable {
            line("unreadable", format!("{object}: {error}"));
        }
        for IncompleteImage { image, objects } in &self.incomplete {
            for object in objects.iter().take(SHOWN_MAX) {
                line("missing", format!("{object} of image {image}"));
            }
            if objects.len() > SHOWN_MAX {
                let more = counted((objects.len() - SHOWN_MAX) as u64, "more object");
                line("missing", format!("{more} of image {image}"));
            }
        }
        for (name, why) in &self.damaged_records {
            line("record", format!("of image {name}: {why}"));
        }
        for name in &self.revived_names {
            let next = "the next start of the server removes it";
            line("deleted", format!("image {name} has still a record; {next}"));
        }
        if let Some(why) = &self.damaged_directories {
            let then = "nobody owns any directory until it is put back";
            line("directories", format!("the file cannot be used: {why}; {then}"));
        }
        for path in &self.unknown_files {
            line("unknown", format!("{path} is not a file of the server"));
        }
        if self.more > 0 {
            line("more", format!("{} are not named", counted(self.more, "finding")));
        }
        line("result", self.result());
        text
    }

    fn rate(&self) -> String {
        if self.reading_seconds <= 0.0 {
            return String::new();
        }
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate for people"
        )]
        let rate = (self.object_bytes as f64 / self.reading_seconds) as u64;
        format!(" read in {:.1} s ({}/s)", self.reading_seconds, size(rate))
    }

    fn result(&self) -> String {
        if self.is_clean() {
            return "all is there and whole".to_owned();
        }
        if self.sound {
            return "all is there and whole; look at what is named above".to_owned();
        }
        let incomplete = self.incomplete.len() + self.damaged_records.len();
        if incomplete == 0 {
            return "no image needs what is damaged".to_owned();
        }
        format!("{} not whole", counted(incomplete as u64, "image"))
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn all_is_told() {
        let [one, two] = [&b"1"[..], b"2"].map(|content| Algorithm::Blake3.digest(content));
        let name = |text| ImageName::new(text).unwrap();
        let mut findings = Findings { objects: 7, object_bytes: 7_000, ..Findings::default() };
        findings.sort();
        let text = "objects     7, 7.0 kB\nimages      0; 0 names deleted\n\
                    result      all is there and whole\n";
        assert_eq!((findings.text().as_str(), findings.is_clean()), (text, true));

        let corrupt = |quarantined| Finding::Corrupt { id: one, size_bytes: 8, quarantined };
        for finding in [
            Finding::Image,
            Finding::Image,
            Finding::Deleted,
            Finding::Empty,
            corrupt(Some("/q/one".into())),
            corrupt(None),
            Finding::Unreadable { id: two, error: "Input/output error".into() },
            Finding::Record { name: name("a/b"), why: "it is cut".into() },
            Finding::Incomplete { name: name("c"), objects: [one, two].into() },
            Finding::DeletedWithRecord(name("d")),
            Finding::Directories("it is cut".into()),
            Finding::Unknown("/data/x".into()),
        ] {
            findings.add(finding);
        }
        findings.unfinished = 2;
        findings.reading_seconds = 0.5;
        findings.sort();
        let text = format!(
            "objects     7, 7.0 kB read in 0.5 s (14.0 kB/s)\n\
             images      2; 1 name deleted\n\
             left over   2 unfinished uploads, removed by the next start of the server\n\
             left over   1 empty file of a crash, replaced by the next upload\n\
             corrupt     {one} (8 bytes); --repair puts it aside\n\
             corrupt     {one} (8 bytes); now /q/one\n\
             unreadable  {two}: Input/output error\n\
             missing     {two} of image c\n\
             missing     {one} of image c\n\
             record      of image a/b: it is cut\n\
             deleted     image d has still a record; the next start of the server removes it\n\
             directories the file cannot be used: it is cut; nobody owns any directory until it is \
             put back\n\
             unknown     /data/x is not a file of the server\n\
             result      2 images not whole\n"
        );
        assert_eq!(findings.text(), text);
        assert!(!findings.sound && !findings.is_clean());
        assert!(findings.is_bad(&one) && findings.is_bad(&two));
    }
}
