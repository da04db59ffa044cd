//! Time zones by their names.

use jiff::tz::{TimeZone, TimeZoneDatabase};

/// A name that is no zone's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no zone that is known; expected a name such as Europe/Berlin or UTC")]
pub struct UnknownZone {
    name: String,
}

/// Returns the zone with that name from `zones`, or from the copy that is built in.
///
/// The zones of the machine come first, because they are updated more often than programs.
///
/// # Errors
///
/// [`UnknownZone`]
pub fn find(name: &str, zones: &TimeZoneDatabase) -> Result<TimeZone, UnknownZone> {
    let found = zones.get(name).or_else(|_| TimeZoneDatabase::bundled().get(name));
    let known = found.ok().filter(|zone| !zone.is_unknown());
    known.ok_or_else(|| UnknownZone { name: model::display::safe_text(name, 64) })
}
