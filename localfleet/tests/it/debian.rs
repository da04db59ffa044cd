//! The same story on real Debian root file-systems.
//!
//! `DEBIAN_TREES` names a directory with the trees `minbase` and `packages`, as `.ci/debian-trees`
//! makes them with debootstrap. Without it this test says that it tests nothing.

use std::path::PathBuf;

use crate::converges::converges_and_stays;

#[test]
fn a_fleet_of_debian_machines_converges_and_stays() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    converges_and_stays(&trees.join("minbase"), &trees.join("packages"));
}
