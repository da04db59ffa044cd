//! The scan with other settings for a preview: which one is wanted, what it found, how long that is
//! kept, and whether there is memory for it. Times are since the start of the scanner.
// tidy: core

use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use model::display::size;
use model::scope::ScanSettings;

use crate::state::Snapshot;

/// How long a result is kept, and how long a scan goes on that nobody asks about.
const KEPT: Duration = Duration::from_secs(10 * 60);

/// A scan that nobody has asked about for so long gives way to one with other settings.
const ABANDONED: Duration = Duration::from_secs(60);

/// What an entry may take in memory, with another digest or other attributes than the scan in
/// force, in bytes.
const ENTRY_BYTES: u64 = 300;

/// What must be left after that, in bytes.
const MEMORY_LEFT_MIN: u64 = 64 << 20;

/// What is known of a preview.
#[derive(Clone, Debug)]
pub enum PreviewState {
    /// It has hashed so many bytes.
    Scanning(u64),
    /// It ended so long ago.
    Done(Arc<Snapshot>, Duration),
}

#[derive(Debug)]
struct Slot {
    settings: Arc<ScanSettings>,
    asked: Duration,
    /// What all scans had hashed when it was asked for, in bytes.
    hashed_before: u64,
    /// What was found, and when; or why it failed.
    result: Option<(Result<Arc<Snapshot>, String>, Duration)>,
}

/// The preview that was asked for last.
#[derive(Debug, Default)]
pub(super) struct Preview(Option<Slot>);

impl Preview {
    /// Asks at the time `now`, when all scans have `hashed` so many bytes, what a scan by
    /// `settings` finds. Starts it if it is not known; `check` says whether there is room for it.
    ///
    /// # Errors
    ///
    /// `Busy` while another preview is wanted, the fault of `check`, or why the scan failed, once.
    pub(super) fn ask(
        &mut self,
        settings: &ScanSettings,
        now: Duration,
        hashed: u64,
        check: impl FnOnce() -> Result<(), Fault>,
    ) -> Result<PreviewState, Fault> {
        self.forget_old(now);
        if let Some(slot) = self.0.as_mut().filter(|slot| *slot.settings == *settings) {
            slot.asked = now;
            return match &slot.result {
                None => Ok(PreviewState::Scanning(hashed.saturating_sub(slot.hashed_before))),
                Some((Ok(found), ended)) => {
                    Ok(PreviewState::Done(Arc::clone(found), now.saturating_sub(*ended)))
                }
                Some((Err(why), _)) => {
                    let fault = Fault::new(FaultCode::Unavailable, why.clone());
                    self.0 = None;
                    Err(fault)
                }
            };
        }
        let is_wanted = |slot: &Slot| slot.result.is_none() && now < slot.asked + ABANDONED;
        if self.0.as_ref().is_some_and(is_wanted) {
            let text = "it scans with the settings of another image for a preview: ask later";
            return Err(Fault::new(FaultCode::Busy, text.to_owned()));
        }
        check()?;
        let settings = Arc::new(settings.clone());
        self.0 = Some(Slot { settings, asked: now, hashed_before: hashed, result: None });
        Ok(PreviewState::Scanning(0))
    }

    /// Returns the settings of the scan to be made.
    pub(super) fn wanted(&self) -> Option<&Arc<ScanSettings>> {
        self.0.as_ref().filter(|slot| slot.result.is_none()).map(|slot| &slot.settings)
    }

    /// Ends the scan by `settings`, if it is still wanted.
    pub(super) fn end(
        &mut self,
        settings: &Arc<ScanSettings>,
        result: Result<Arc<Snapshot>, String>,
        now: Duration,
    ) {
        let slot = self.0.as_mut().filter(|slot| Arc::ptr_eq(&slot.settings, settings));
        if let Some(slot) = slot {
            slot.result = Some((result, now));
        }
    }

    /// Returns what the last one found.
    pub(super) fn found(&self) -> Option<&Arc<Snapshot>> {
        let (result, _) = self.0.as_ref()?.result.as_ref()?;
        result.as_ref().ok()
    }

    /// Drops what was found, and has a scan that is under way start again: the tree changes.
    pub(super) fn invalidate(&mut self) {
        self.0.take_if(|slot| slot.result.is_some());
        if let Some(slot) = &mut self.0 {
            slot.settings = Arc::new(ScanSettings::clone(&slot.settings));
        }
    }

    /// Drops a result that was kept long enough, and a scan that nobody has asked about for long.
    /// Returns when the next one is to be dropped.
    pub(super) fn forget_old(&mut self, now: Duration) -> Option<Duration> {
        let end = |slot: &Slot| slot.result.as_ref().map_or(slot.asked, |(_, ended)| *ended) + KEPT;
        self.0.take_if(|slot| end(slot) <= now);
        self.0.as_ref().map(end)
    }
}

/// The shortest and the longest time that a preview has before it gives way to a metadata pass that
/// is due.
const SLICE_MIN: Duration = Duration::from_secs(5);
const SLICE_MAX: Duration = Duration::from_secs(60 * 60);

/// When a preview that was interrupted may run again, and for how long. It walks the tree anew each
/// time, so each turn is longer than the last one until a walk fits into it. The passes over all
/// files have as much time as it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreviewTurn {
    pub(super) slice: Duration,
    pub(super) next: Duration,
}

impl Default for PreviewTurn {
    fn default() -> Self {
        Self { slice: SLICE_MIN, next: Duration::ZERO }
    }
}

impl PreviewTurn {
    /// Returns the next turn, after one of this length was interrupted at the time `now`.
    pub(super) fn after(self, took: Duration, now: Duration) -> Self {
        let slice = if took < self.slice { self.slice } else { self.slice * 2 };
        Self { slice: slice.min(SLICE_MAX), next: now + took }
    }
}

/// True if a preview that is under way must end.
pub(super) fn is_memory_scarce(available: Option<u64>) -> bool {
    available.is_some_and(|available| available < MEMORY_LEFT_MIN / 2)
}

/// Checks that a second tree of so many `entries` fits into the `available` memory.
pub(super) fn check_memory(entries: u64, available: Option<u64>) -> Result<(), Fault> {
    let needed = entries.saturating_mul(ENTRY_BYTES).saturating_add(MEMORY_LEFT_MIN);
    match available.filter(|available| *available < needed) {
        None => Ok(()),
        Some(available) => {
            let text = format!(
                "a scan of {entries} paths beside the one in force may need {} of memory, and {} \
                 are available",
                size(needed),
                size(available)
            );
            Err(Fault::new(FaultCode::NoSpace, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use model::scope::{Attributes, Scope};

    use super::*;

    fn settings(attributes: Attributes) -> ScanSettings {
        ScanSettings { attributes, ..ScanSettings::default() }
    }

    fn snapshot() -> Arc<Snapshot> {
        let settings = Arc::new(settings(Attributes::Basic));
        Arc::new(Snapshot {
            scope: Scope::of(&settings, &[]),
            settings,
            revision: 1,
            tree: None,
            report: None,
            left_alone: Vec::new(),
            index: OnceLock::new(),
        })
    }

    /// Asks, and tells the answer in a word.
    fn ask(preview: &mut Preview, attributes: Attributes, seconds: u64) -> String {
        let now = Duration::from_secs(seconds);
        match preview.ask(&settings(attributes), now, 100 + seconds, || Ok(())) {
            Ok(PreviewState::Scanning(bytes)) => format!("scanning {bytes}"),
            Ok(PreviewState::Done(_, age)) => format!("done {}", age.as_secs()),
            Err(fault) => format!("{:?}", fault.code),
        }
    }

    fn end(preview: &mut Preview, result: Result<Arc<Snapshot>, String>, seconds: u64) {
        let settings = Arc::clone(preview.wanted().unwrap());
        preview.end(&settings, result, Duration::from_secs(seconds));
    }

    #[test]
    fn one_preview_at_a_time_is_made_and_its_result_is_kept() {
        use Attributes::{Basic, Labels};
        let mut preview = Preview::default();
        assert_eq!(ask(&mut preview, Basic, 0), "scanning 0");
        assert_eq!(ask(&mut preview, Basic, 50), "scanning 50");
        assert_eq!(ask(&mut preview, Labels, 109), "Busy");
        // Nobody asks for the first any more.
        assert_eq!(ask(&mut preview, Labels, 110), "scanning 0");
        end(&mut preview, Ok(snapshot()), 120);
        assert!(preview.found().is_some() && preview.wanted().is_none());
        assert_eq!(ask(&mut preview, Labels, 719), "done 599");
        assert_eq!(ask(&mut preview, Labels, 720), "scanning 0");
        end(&mut preview, Ok(snapshot()), 721);
        assert_eq!(ask(&mut preview, Basic, 722), "scanning 0");
        end(&mut preview, Err("no".to_owned()), 723);
        assert_eq!(ask(&mut preview, Basic, 724), "Unavailable");
        assert_eq!(ask(&mut preview, Basic, 725), "scanning 0");
    }

    #[test]
    fn a_change_of_the_tree_ends_what_was_known() {
        let mut preview = Preview::default();
        ask(&mut preview, Attributes::Basic, 0);
        let before = Arc::clone(preview.wanted().unwrap());
        preview.invalidate();
        preview.end(&before, Ok(snapshot()), Duration::ZERO);
        assert!(preview.found().is_none());
        end(&mut preview, Ok(snapshot()), 1);
        preview.invalidate();
        assert!(preview.found().is_none() && preview.wanted().is_none());
    }

    #[test]
    fn a_scan_that_nobody_asks_about_ends() {
        let mut preview = Preview::default();
        ask(&mut preview, Attributes::Basic, 0);
        ask(&mut preview, Attributes::Basic, 100);
        let seconds = Duration::from_secs;
        assert_eq!(preview.forget_old(seconds(699)), Some(seconds(700)));
        assert!(preview.wanted().is_some());
        assert_eq!(preview.forget_old(seconds(700)), None);
        assert!(preview.wanted().is_none());
    }

    #[test]
    fn turns_grow_until_one_is_long_enough_and_leave_as_much_time_to_others() {
        let seconds = Duration::from_secs;
        let first = PreviewTurn::default();
        let turn = |slice, next| PreviewTurn { slice: seconds(slice), next: seconds(next) };
        assert_eq!(first, turn(5, 0));
        // An update or a caller who waits does not count.
        assert_eq!(first.after(seconds(4), seconds(10)), turn(5, 14));
        let second = first.after(seconds(6), seconds(20));
        assert_eq!(second, turn(10, 26));
        assert_eq!(turn(2_000, 0).after(seconds(2_001), seconds(3_000)), turn(3_600, 5_001));
    }

    #[test]
    fn a_preview_starts_only_if_it_has_memory() {
        let mib = |count: u64| Some(count << 20);
        #[rustfmt::skip]
        let table = [
            (0, None, true), (0, mib(64), true), (0, mib(63), false), (1_000_000, mib(350), false),
            (1_000_000, mib(351), true), (u64::MAX, Some(u64::MAX - 1), false),
        ];
        for (entries, available, is_enough) in table {
            let checked = check_memory(entries, available);
            assert_eq!(checked.is_ok(), is_enough, "{entries} {available:?}: {checked:?}");
        }
        let mut preview = Preview::default();
        let full = || check_memory(1, mib(1));
        let asked = preview.ask(&settings(Attributes::Basic), Duration::ZERO, 0, full);
        assert_eq!(asked.unwrap_err().code, FaultCode::NoSpace);
        assert!(preview.wanted().is_none());
    }
}
