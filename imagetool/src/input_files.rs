//! The files that describe an image: filter, triggers, computed files, health check.

pub mod computed;
pub mod filters;
pub mod health_check;
pub mod triggers;

use std::io::{self, Read as _};
use std::path::Path;

use model::filter::Filter;
use model::image::HealthCheck;
use model::trigger::Triggers;

use self::computed::ComputedRules;
use crate::output::failure::Failure;

/// The largest file that describes an image, in bytes.
const TEXT_BYTES_MAX: u64 = 8 << 20;

pub fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Reads a text file of at most `TEXT_BYTES_MAX`; errors call it `what`.
pub fn read_text(path: &Path, what: &str) -> Result<String, Failure> {
    read_text_up_to(path, what, TEXT_BYTES_MAX)
}

/// Reads a text file of at most `bytes_max`; errors call it `what`.
pub fn read_text_up_to(path: &Path, what: &str, bytes_max: u64) -> Result<String, Failure> {
    let read = || -> io::Result<String> {
        let mut text = String::new();
        fs_err::File::open(path)?.take(bytes_max + 1).read_to_string(&mut text)?;
        if text.len() as u64 > bytes_max {
            let why = format!("it is larger than {bytes_max} bytes");
            return Err(io::Error::other(format!("{}: {why}", path.display())));
        }
        Ok(text)
    };
    read().map_err(|error| Failure::of_text(format!("cannot read the {what}: {error}")))
}

fn hint_dash(failure: Failure) -> Failure {
    failure.hint("`-` stands for none")
}

pub fn read_filter(path: &Path) -> Result<Option<Filter>, Failure> {
    if is_dash(path) {
        return Ok(None);
    }
    let text = read_text(path, "filter").map_err(hint_dash)?;
    parse_filter(path, &text).map(Some)
}

pub fn parse_filter(path: &Path, text: &str) -> Result<Filter, Failure> {
    Filter::from_text(text).map_err(|error| {
        Failure::of_text(format!("{}: {}", path.display(), model::report::report(&error)))
    })
}

pub fn read_triggers(path: &Path) -> Result<Triggers, Failure> {
    if is_dash(path) {
        return Ok(Triggers::default());
    }
    let text = read_text(path, "triggers").map_err(hint_dash)?;
    parse_triggers(path, &text)
}

pub fn parse_triggers(path: &Path, text: &str) -> Result<Triggers, Failure> {
    Triggers::from_json(text).map_err(|error| {
        Failure::of_text(format!("{}: {}", path.display(), model::report::report(&error)))
    })
}

pub fn read_health_check(path: &Path) -> Result<HealthCheck, Failure> {
    let text = read_text(path, "health check")?;
    health_check::parse(&text).map_err(|error| {
        Failure::of_text(format!("{}: {error}", path.display()))
            .hint("imagetool add --help shows one")
    })
}

pub fn read_computed_rules(path: &Path) -> Result<ComputedRules, Failure> {
    let text = read_text(path, "list of computed files")?;
    ComputedRules::from_text(&text).map_err(|error| {
        Failure::of_text(format!("{}: {}", path.display(), model::report::report(&error)))
    })
}
