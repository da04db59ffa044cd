//! Shows the progress of long operations on a terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress is shown after this time.
const SHOW_AFTER: Duration = Duration::from_millis(250);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    /// Files, objects or entries.
    Items,
}

/// Counts progress. Cheap to clone; several threads may count.
#[derive(Clone)]
pub struct Meter {
    bar: Option<Arc<Bar>>,
}

struct Bar {
    bar: ProgressBar,
    visible: AtomicBool,
    since: std::sync::Mutex<Instant>,
}

impl Meter {
    /// Returns a meter that shows nothing.
    pub fn hidden() -> Self {
        Self { bar: None }
    }

    /// Returns a meter on the standard error, if that is a terminal.
    pub fn on_terminal() -> Self {
        if !std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            return Self::hidden();
        }
        Self {
            bar: Some(Arc::new(Bar {
                bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
                visible: AtomicBool::new(false),
                since: std::sync::Mutex::new(Instant::now()),
            })),
        }
    }

    /// Starts to count from zero, up to `total` if that is known.
    pub fn start(&self, what: &'static str, unit: Unit, total: Option<u64>) {
        let Some(this) = &self.bar else { return };
        let template = match (unit, total) {
            (Unit::Bytes, None) => "{msg}: {decimal_bytes}, {decimal_bytes_per_sec}",
            (Unit::Bytes, Some(_)) => {
                "{msg}: {decimal_bytes} of {decimal_total_bytes} [{wide_bar}] \
                 {decimal_bytes_per_sec}, {eta} left"
            }
            (Unit::Items, None) => "{msg}: {human_pos}",
            (Unit::Items, Some(_)) => "{msg}: {human_pos} of {human_len} [{wide_bar}] {eta} left",
        };
        let style = ProgressStyle::with_template(template).expect("the templates are constants");
        this.bar.reset();
        this.bar.set_style(style);
        this.bar.set_message(what);
        match total {
            Some(total) => this.bar.set_length(total),
            None => this.bar.unset_length(),
        }
        *this.since.lock().expect("no holder panics") = Instant::now();
    }

    /// Counts `more`.
    pub fn add(&self, more: u64) {
        let Some(this) = &self.bar else { return };
        this.bar.inc(more);
        if !this.visible.load(Ordering::Relaxed)
            && this.since.lock().expect("no holder panics").elapsed() > SHOW_AFTER
            && !this.visible.swap(true, Ordering::Relaxed)
        {
            this.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
    }

    /// Takes the display away.
    pub fn finish(&self) {
        let Some(this) = &self.bar else { return };
        this.bar.finish_and_clear();
        this.bar.set_draw_target(ProgressDrawTarget::hidden());
        this.visible.store(false, Ordering::Relaxed);
    }
}
