//! What daemons keep, as former releases wrote it, opened by this one.
//!
//! `state/RELEASE` has the archives that [`make`] wrote with the daemons of that release. They are
//! never written anew: a later release adds a folder of its own, and opens all of them.
//!
//! | archive | what |
//! |---|---|
//! | `tls` | an authority with a revoked certificate, and a directory for each daemon and user |
//! | `imageserver` | a data directory: images, packed objects, names that are gone, holds |
//! | `replica` | the data directory of a replica of it, that is an archive |
//! | `dominator` | a state directory: orders, history, the machine database in force |
//! | `subd` | the root of a machine, with what subd keeps in it |
//! | `stopping` | the same, of a subd that was killed in an update, before its first step |
//! | `starting` | the same, killed after the last step |
//! | `mdbd` | a state directory |
//!
//! `stopping` and `starting` have a file `inodes`: the number and the path of each entry. A journal
//! names inodes, which are others where the archive is unpacked.
//!
//! The keys in `tls` protect nothing. Its certificates hold for a hundred years from November 2026
//! on, its list of revoked ones for ten.

mod make;
mod open;
mod place;
