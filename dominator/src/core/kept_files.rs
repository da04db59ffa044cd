//! What is asked and told of the files that a machine keeps with numbers of users and groups that
//! mean others in its next image.
// tidy: core

use api::dominator::kept_files::{KeptFiles, KeptNumber};
use api::subd::{CountOwnersReply, CountOwnersRequest, OWNERS_MAX};
use model::accounts::{AccountKind, Accounts};
use model::display::{counted, safe_text};
use model::scope::ScanSettings;

/// The longest text of an image or machine, in bytes.
const TEXT_BYTES_MAX: usize = 200;

/// How long a machine counts, in milliseconds.
pub const COUNT_MS: u32 = 30_000;

/// Returns the numbers of `former` that mean others in `new`. Names are not trusted.
///
/// # Errors
///
/// A text if they are more than a machine counts.
pub fn old_numbers(former: &Accounts, new: &Accounts) -> Result<Vec<KeptNumber>, String> {
    let changed = new.changed_numbers(former);
    if changed.len() > OWNERS_MAX {
        let numbers = counted(changed.len() as u64, "number");
        return Err(format!(
            "{numbers} of users and groups differ: at most {OWNERS_MAX} are counted"
        ));
    }
    let name = |text: &str| safe_text(text, TEXT_BYTES_MAX);
    let kept = changed.into_iter().map(|changed| KeptNumber {
        kind: changed.kind,
        number: changed.number,
        former: name(&changed.former),
        now: changed.now.as_deref().map(name),
        files: None,
    });
    Ok(kept.collect())
}

/// Returns what to ask a machine that would keep what `scan` leaves out.
#[must_use]
pub fn request(scan: &ScanSettings, numbers: &[KeptNumber]) -> CountOwnersRequest {
    let of = |kind| {
        let numbers = numbers.iter().filter(|one| one.kind == kind);
        numbers.map(|one| one.number).collect()
    };
    CountOwnersRequest {
        scan: scan.clone(),
        users: of(AccountKind::User),
        groups: of(AccountKind::Group),
        time_ms: COUNT_MS,
    }
}

/// Adds what the machine has answered to the request for the numbers of `kept`.
pub fn add_counts(kept: &mut KeptFiles, reply: Result<CountOwnersReply, String>) {
    let reply = match reply {
        Ok(reply) => reply,
        Err(why) => {
            kept.unknown = Some(safe_text(&why, TEXT_BYTES_MAX));
            return;
        }
    };
    let (mut users, mut groups) = (reply.users.into_iter(), reply.groups.into_iter());
    for one in &mut kept.numbers {
        one.files = match one.kind {
            AccountKind::User => users.next(),
            AccountKind::Group => groups.next(),
        };
    }
    if kept.numbers.iter().any(|one| one.files.is_none()) {
        kept.unknown = Some("its answer lacks some of them".to_owned());
    }
    kept.unfinished = reply.unfinished.map(|why| safe_text(&why, TEXT_BYTES_MAX));
}

#[cfg(test)]
mod tests {
    use model::accounts::ids;
    use model::image::ImageName;

    use super::*;

    fn accounts(users: &str, groups: &str) -> Accounts {
        Accounts { users: ids(users), groups: ids(groups) }
    }

    #[test]
    fn a_machine_is_asked_for_old_numbers_and_its_counts_go_to_their_numbers() {
        let former = accounts("root:x:0:\na:x:1:\npostfix:x:105:", "mail:x:8:\nkeys:x:9:");
        let new = accounts("root:x:0:\na:x:2:\nredis:x:105:", "mail:x:9:\nkeys:x:8:");
        let numbers = old_numbers(&former, &new).unwrap();
        let asked = request(&ScanSettings::default(), &numbers);
        assert_eq!((asked.users, asked.groups), (vec![1, 105], vec![9, 8]));
        let image = |name| ImageName::new(name).unwrap();
        let kept = KeptFiles {
            hostname: "web1".to_owned(),
            from: image("base/1"),
            image: image("base/2"),
            numbers,
            unfinished: None,
            unknown: None,
        };
        let counts = |users: &[u32], groups: &[u32]| CountOwnersReply {
            users: users.to_vec(),
            groups: groups.to_vec(),
            ..CountOwnersReply::default()
        };
        let of = |number, former, now| {
            format!("UID {number}, which is {former} in base/1 and {now} in base/2")
        };
        let one = format!("web1: 7 kept files have {}", of(1, "a", "no user"));
        let other = format!("web1: 1 kept file has {}", of(105, "postfix", "redis"));
        let group = "web1: 3 kept files have GID 8, which is mail in base/1 and keys in base/2";
        let unknown = "NOT KNOWN: how many files web1 keeps with old numbers (UID 1, UID 105, GID \
                       9, GID 8): ";
        let table = [
            (Ok(counts(&[7, 1], &[0, 3])), vec![one.clone(), other, group.to_owned()]),
            (Ok(counts(&[0, 0], &[0, 0])), vec![]),
            (
                Ok(counts(&[7], &[0, 0])),
                vec![one, format!("{unknown}its answer lacks some of them")],
            ),
            (Err("it is old".to_owned()), vec![format!("{unknown}it is old")]),
        ];
        for (reply, lines) in table {
            let mut kept = kept.clone();
            add_counts(&mut kept, reply);
            assert_eq!(kept.lines(), lines);
        }
    }

    #[test]
    fn too_many_numbers_are_not_asked_for_and_names_are_made_printable() {
        let many = |shift: u32| {
            let lines: Vec<String> =
                (0..1_001).map(|user| format!("user{user}:x:{}:", user + shift)).collect();
            accounts(&lines.join("\n"), "")
        };
        let why = old_numbers(&many(0), &many(5_000)).unwrap_err();
        assert_eq!(why, "1001 numbers of users and groups differ: at most 1000 are counted");
        let odd =
            old_numbers(&accounts("\x1b[2J:x:1:", ""), &accounts("\x1b[2J:x:2:", "")).unwrap();
        assert_eq!(odd[0].former, " [2J");
    }
}
