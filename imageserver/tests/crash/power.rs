//! Power cuts at each call of a change.

use std::fmt;

use testing::crash_points::copy;
use testing::power_cut::{Cut, Image};
use testing::strace::{Class, Fault, Faults, Point};

use crate::trial::{Lab, Outcome, Quarantine, check, outcome};

/// The size of the file-system whose power is cut.
const DISK_BYTES: u64 = 24 << 20;

struct PowerCut {
    point: Point,
    cut: Cut,
    options: &'static str,
}

impl fmt::Display for PowerCut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}:{}", self.cut.name(), self.options, self.point.call)
    }
}

impl PowerCut {
    fn survive(&self, lab: &Lab, image: &Image) -> Result<(), String> {
        let top = lab.scratch.free_path();
        std::fs::create_dir(&top).unwrap();
        let data = top.join("data");
        let mut disk = image.mount_copy(lab.scratch.free_path(), top, self.options);
        let output = lab.run(&data, &Faults::from(&self.point))?;
        disk.cut(self.cut);
        let checked = check(lab.change, &data, outcome(&output)?, Quarantine::Unneeded);
        disk.remove();
        checked
    }
}

/// Makes a file-system that holds the store before the change.
fn image(lab: &Lab) -> Image {
    let fill = |top: &std::path::Path| copy(&lab.template, &top.join("data"));
    Image::make(lab.scratch.free_path(), DISK_BYTES, fill)
}

/// Turns off all syncs and cuts the power when the change is made. If that did no damage, the other
/// power cuts would prove nothing.
pub fn power_cut_without_syncs(lab: &Lab) -> Result<(), String> {
    let top = lab.scratch.free_path();
    std::fs::create_dir(&top).unwrap();
    let data = top.join("data");
    let mut disk = image(lab).mount_copy(lab.scratch.free_path(), top, "noauto_da_alloc");
    let output = lab.run(&data, &Faults { no_sync: true, ..Faults::default() })?;
    disk.cut(Cut::Hard);
    let checked = check(lab.change, &data, Outcome::Done, Quarantine::Unneeded);
    disk.remove();
    match (outcome(&output)?, checked) {
        (Outcome::Done, Err(_)) => Ok(()),
        other => Err(format!("the missing syncs did no damage: {other:?}")),
    }
}

/// Cuts the power at each call that changes something.
pub fn power_cut(lab: &Lab) -> Result<(), String> {
    let image = image(lab);
    let mut all = Vec::new();
    for options in ["auto_da_alloc", "noauto_da_alloc", "noauto_da_alloc,data=writeback"] {
        for cut in Cut::ALL {
            let points = lab.points(Class::Change, Fault::Kill).into_iter();
            all.extend(points.map(|point| PowerCut { point, cut, options }));
        }
    }
    lab.each("power cut", all, |point| point.survive(lab, &image))
}
