//! The phase of an update, which is the name of the directory that holds its slots.
//!
//! A change of the phase is one rename, which is atomic and needs no space. The name counts only
//! together with the [journal](super::journal) of the same update; the slots of an update that is
//! over may be freed at any time.
//!
//! | phase | directory | the tree | what is to be done |
//! |---|---|---|---|
//! | staged | `staging/ID` | as it was | all of it |
//! | begun | `undo/ID` | anywhere between | the rest of the steps |
//! | live | `undo/ID.live.BOOT` | as planned, synced | services, health check |
//! | back | `undo/ID.back` | anywhere between | undo all steps, services |
//! | undoing | `undo/ID.undoing` | anywhere between | the same, after a health check |
//! | done | `undo/ID.done` | as planned, synced | note it, free the slots |
//! | rolled back | `undo/ID.rolled-back` | as it was, synced | note it, free the slots |
//! | undone | `undo/ID.undone` | as it was, synced | the same, after a health check |
// tidy: core

/// The phase of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    Staged,
    /// The steps are being taken.
    Begun,
    /// The tree is as planned.
    Live {
        /// The boot in which it became so.
        boot_id: String,
    },
    /// A step failed: all are being undone.
    Back,
    /// The health check failed: all steps are being undone.
    Undoing,
    /// It is over, and the tree is as planned.
    Done,
    /// It is over, and the tree is as it was, because a step failed.
    RolledBack,
    /// It is over, and the tree is as it was, because the health check failed.
    Undone,
}

const ENDINGS: [(Phase, &str); 5] = [
    (Phase::Back, "back"),
    (Phase::Undoing, "undoing"),
    (Phase::Done, "done"),
    (Phase::RolledBack, "rolled-back"),
    (Phase::Undone, "undone"),
];

impl Phase {
    /// The phases of updates that have ended.
    pub const OVER: [Self; 3] = [Self::Done, Self::RolledBack, Self::Undone];

    /// True if only reporting the result is left.
    pub fn is_over(&self) -> bool {
        Self::OVER.contains(self)
    }

    /// The name of the directory with the slots.
    pub fn directory(&self, update_id: u64) -> Vec<u8> {
        let name = match self {
            Self::Staged | Self::Begun => update_id.to_string(),
            Self::Live { boot_id } => format!("{update_id}.live.{boot_id}"),
            other => {
                let ending = ENDINGS.iter().find(|(phase, _)| phase == other);
                let (_, ending) = ending.expect("the others have endings");
                format!("{update_id}.{ending}")
            }
        };
        name.into_bytes()
    }

    /// Parses the name of a directory in `undo`; `None` for a name that subd does not make.
    pub fn of_directory(name: &[u8]) -> Option<(u64, Self)> {
        let name = std::str::from_utf8(name).ok()?;
        let (update_id, ending) = name.split_once('.').unwrap_or((name, ""));
        let phase = match ending.strip_prefix("live.") {
            _ if name == update_id => Self::Begun,
            Some(boot_id) => Self::Live { boot_id: boot_id.to_owned() },
            None => ENDINGS.iter().find(|(_, known)| *known == ending)?.0.clone(),
        };
        let update_id: u64 = update_id.parse().ok()?;
        (phase.directory(update_id) == name.as_bytes()).then_some((update_id, phase))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_phases_fit() {
        #[rustfmt::skip]
        let table = [
            (Phase::Begun,                              "7"),
            (Phase::Live { boot_id: "1-2".to_owned() }, "7.live.1-2"),
            (Phase::Live { boot_id: String::new() },    "7.live."),
            (Phase::Back,                               "7.back"),
            (Phase::Undoing,                            "7.undoing"),
            (Phase::Done,                               "7.done"),
            (Phase::RolledBack,                         "7.rolled-back"),
            (Phase::Undone,                             "7.undone"),
        ];
        for (phase, name) in table {
            assert_eq!(phase.directory(7), name.as_bytes());
            assert_eq!(Phase::of_directory(name.as_bytes()), Some((7, phase)));
        }
        for name in ["", "07", "7.", "+7", "7.gone", "7.live", ".done", "x", "7.done.", "\u{e9}"] {
            assert_eq!(Phase::of_directory(name.as_bytes()), None, "{name}");
        }
    }
}
