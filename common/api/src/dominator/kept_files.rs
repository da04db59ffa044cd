//! `Dominator.CountKeptFiles`: files that machines would keep with numbers of users and groups that
//! mean others in the image that they would get.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::method::{Effect, Method};
use model::accounts::AccountKind;
use model::display::grouped;
use model::image::ImageName;

/// Compares the users and groups of images with those of the machines' former images. If numbers
/// differ it has the machines count the files that they keep with the old numbers. Nothing changes.
pub enum CountKeptFiles {}

/// The most machines in one request: they count at the same time.
pub const COUNTING_MAX: usize = 50;

/// A machine, and the image that it would get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ImageOfMachine {
    pub hostname: String,
    pub image: ImageName,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CountKeptFilesRequest {
    /// At most [`COUNTING_MAX`].
    pub machines: Vec<ImageOfMachine>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CountKeptFilesReply {
    /// The machines for which numbers differ, or for which that is not known.
    pub machines: Vec<KeptFiles>,
}

/// The files of one machine with old numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeptFiles {
    pub hostname: String,
    /// The image that it was last updated to.
    pub from: ImageName,
    /// The image that it would get.
    pub image: ImageName,
    /// The numbers that mean others, of users and then of groups.
    pub numbers: Vec<KeptNumber>,
    /// Why the machine may keep more of these files; `None` if all were counted.
    pub unfinished: Option<String>,
    /// Why it is not known which numbers differ, or how many files have them.
    pub unknown: Option<String>,
}

/// A number that means another user or group in the new image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeptNumber {
    pub kind: AccountKind,
    pub number: u32,
    /// Who has it in the former image.
    pub former: String,
    /// Who has it in the new image, if anybody.
    pub now: Option<String>,
    /// How many files, directories and other entries the machine keeps with it; `None` if that is
    /// not known.
    pub files: Option<u32>,
}

impl KeptFiles {
    /// Formats it for people. There are no lines if everything was counted and nothing found.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let Self { hostname, from, image, numbers, .. } = self;
        let mut lines = Vec::new();
        for one in numbers {
            let Some(files) = one.files.filter(|files| *files > 0) else { continue };
            let (what, least) = (one.kind.number_name(), self.unfinished.as_ref());
            let least = least.map_or("", |_| "at least ");
            let have = if files == 1 { "kept file has" } else { "kept files have" };
            let now = match &one.now {
                Some(now) => now.clone(),
                None => format!("no {}", one.kind.name()),
            };
            let (files, number, former) = (grouped(files.into()), one.number, &one.former);
            lines.push(format!(
                "{hostname}: {least}{files} {have} {what} {number}, which is {former} in {from} \
                 and {now} in {image}"
            ));
        }
        if let Some(why) = &self.unfinished {
            lines.push(format!("{hostname}: not all kept files were looked at: {why}"));
        }
        if let Some(why) = &self.unknown {
            let named = |one: &KeptNumber| format!("{} {}", one.kind.number_name(), one.number);
            let named: Vec<String> = numbers.iter().take(NAMED).map(named).collect();
            let more = if numbers.len() > NAMED { ", ..." } else { "" };
            let what = match named.is_empty() {
                true => "old numbers of users and groups".to_owned(),
                false => format!("old numbers ({}{more})", named.join(", ")),
            };
            lines.push(format!("NOT KNOWN: how many files {hostname} keeps with {what}: {why}"));
        }
        lines
    }
}

/// How many numbers a line names.
const NAMED: usize = 5;

impl Method for CountKeptFiles {
    const NAME: &'static str = "Dominator.CountKeptFiles";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = CountKeptFilesRequest;
    type Reply = CountKeptFilesReply;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_many_files_have_which_number_and_what_is_not_known() {
        let number = |kind, number, now: Option<&str>, files| KeptNumber {
            kind,
            number,
            former: "postfix".to_owned(),
            now: now.map(str::to_owned),
            files,
        };
        let user = |files| number(AccountKind::User, 105, Some("redis"), files);
        let group = |files| number(AccountKind::Group, 110, None, files);
        let in_both = "postfix in base/1 and redis in base/2";
        let many = format!("web1: 1,204 kept files have UID 105, which is {in_both}");
        let least = format!("web1: at least 1 kept file has UID 105, which is {in_both}");
        let left = "web1: not all kept files were looked at: an update began".to_owned();
        let groups = "web1: 1,000,000 kept files have GID 110, which is postfix in base/1 and no \
                      group in base/2";
        let unknown = "NOT KNOWN: how many files web1 keeps with old numbers";
        let both = format!("{unknown} (UID 105, GID 110): it is old");
        let none = format!("{unknown} of users and groups: it is old");
        #[rustfmt::skip]
        let table = [
            (vec![], None, None, vec![]),
            (vec![user(Some(1_204))], None, None, vec![many.clone()]),
            (vec![user(Some(1_204)), group(Some(1_000_000))], None, None, vec![many, groups.into()]),
            (vec![user(Some(0)), group(Some(0))], None, None, vec![]),
            (vec![user(Some(1)), group(Some(0))], Some("an update began"), None, vec![least, left]),
            (vec![user(None), group(None)], None, Some("it is old"), vec![both]),
            (vec![], None, Some("it is old"), vec![none]),
        ];
        for (numbers, unfinished, unknown, expected) in table {
            let kept = KeptFiles {
                hostname: "web1".to_owned(),
                from: ImageName::new("base/1").unwrap(),
                image: ImageName::new("base/2").unwrap(),
                numbers,
                unfinished: unfinished.map(str::to_owned),
                unknown: unknown.map(str::to_owned),
            };
            assert_eq!(kept.lines(), expected);
        }
    }
}
