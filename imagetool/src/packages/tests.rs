//! Databases of packages, good and hostile ones.

use model::object::Algorithm;
use model::tree::text::from_text;

use super::*;

fn read(databases: &[(Format, &str)]) -> Result<Vec<String>, PackagesError> {
    let database_files: Vec<DatabaseFile> = databases
        .iter()
        .map(|(format, _)| DatabaseFile {
            object: Algorithm::Blake3.digest(b""),
            size_bytes: 0,
            format: *format,
        })
        .collect();
    let contents = databases.iter().map(|(_, content)| content.as_bytes());
    let packages = packages(database_files.iter().zip(contents))?;
    let line = |one: &Package| format!("{} {} {}", one.name, one.version, one.size_bytes);
    Ok(packages.iter().map(line).collect())
}

const DPKG: &str = "\
Package: libc6
Status: install ok installed
Installed-Size: 12977
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library
 Package: not a field
 .
 Version: neither

Package: libc6
Status: install ok installed
Architecture: i386
Version: 2.36-9+deb12u10

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: half
Status: install reinstreq half-installed
Version: 1

Package: adduser
Status: hold ok installed
Architecture: all
Version: 3.134
Installed-Size: 686
";

const APK: &str = "\
C:Q1x
P:musl
V:1.2.4-r2
A:x86_64
S:383152
I:622592
T:the musl c library (libc)
F:lib
R:ld-musl-x86_64.so.1

P:busybox
V:1.36.1-r15
A:x86_64
I:950272
";

#[test]
fn databases_are_read() {
    let dpkg =
        ["adduser 3.134 702464", "libc6 2.36-9+deb12u10 13288448", "libc6:i386 2.36-9+deb12u10 0"];
    assert_eq!(read(&[(Format::Dpkg, DPKG)]).unwrap(), dpkg);
    assert_eq!(read(&[(Format::Dpkg, &DPKG.replace('\n', "\r\n"))]).unwrap(), dpkg);
    let distroless = "Package: base-files\nVersion: 12.4\nArchitecture: amd64\n";
    let tzdata = "Package: tzdata\nVersion: 2024a\nArchitecture: all\nInstalled-Size: 10";
    let files = [(Format::Dpkg, distroless), (Format::Dpkg, tzdata)];
    assert_eq!(read(&files).unwrap(), ["base-files 12.4 0", "tzdata 2024a 10240"]);
    let apk = ["busybox 1.36.1-r15 950272", "musl 1.2.4-r2 622592"];
    assert_eq!(read(&[(Format::Apk, APK)]).unwrap(), apk);
    assert_eq!(read(&[]).unwrap(), Vec::<String>::new());
}

#[test]
fn what_is_no_database_gives_nothing_worse_than_nonsense() {
    let huge = format!("Package: {}\nVersion: \u{1b}[2J\u{7}\n", "x".repeat(1 << 20));
    let got = read(&[(Format::Dpkg, &huge)]).unwrap();
    assert_eq!(got, [format!("{} ...  [2J  0", "x".repeat(WORD_BYTES_MAX))]);
    for text in ["", "\n\n\n", ":", "Package", "Package:\n\nVersion: 1", "P:\n\nV:1\n\n:", "\0\0"] {
        let damaged = read(&[(Format::Rpm, text)]).unwrap_err();
        assert!(matches!(damaged, PackagesError::Damaged { .. }), "{text:?}");
        for format in [Format::Dpkg, Format::Apk] {
            assert_eq!(read(&[(format, text)]).unwrap(), Vec::<String>::new(), "{text:?}");
        }
    }
    let sizes = "P:a\nI:99999999999999999999\n\nP:b\nI:-1\n\nP:c\nI:18446744073709551615\n";
    let got = read(&[(Format::Apk, sizes)]).unwrap();
    assert_eq!(got, ["a  0", "b  0", "c  18446744073709551615"]);
    let many: String = (0..=PACKAGES_MAX).map(|number| format!("P:{number}\n\n")).collect();
    assert_eq!(read(&[(Format::Apk, &many)]), Err(PackagesError::TooMany));
    let name = "x".repeat(200);
    let long: String = (0..30_000).map(|number| format!("P:{number}{name}\n\n")).collect();
    assert_eq!(read(&[(Format::Apk, &long)]), Err(PackagesError::TooMany));
}

#[test]
fn the_databases_of_a_tree_are_found() {
    let digest = Algorithm::Blake3.digest(b"x");
    let tree = |paths: &[(&str, u64)]| {
        let mut lines = std::collections::BTreeSet::new();
        for (path, size_bytes) in paths {
            let path: TreePath = path.parse().unwrap();
            for above in path.ancestors().skip(1).filter(|above| !above.is_root()) {
                lines.insert((above.clone(), format!("d 755 0:0 {above}\n")));
            }
            let line = format!("f 644 0:0 1.000000000 {size_bytes} {digest} {path}\n");
            lines.insert((path, line));
        }
        let text: String = lines.into_iter().map(|(_, line)| line).collect();
        from_text(Algorithm::Blake3, &text).unwrap()
    };
    let found = |paths: &[(&str, u64)]| {
        let database_files = database_files(&tree(paths))?;
        Ok(database_files.iter().map(|file| (file.format, file.size_bytes)).collect::<Vec<_>>())
    };
    let many: Vec<String> =
        (0..=FILES_MAX).map(|number| format!("/var/lib/dpkg/status.d/{number}")).collect();
    let many: Vec<(&str, u64)> = many.iter().map(|path| (path.as_str(), 1)).collect();
    let foreign = |path: &str| PackagesError::Foreign { path: path.parse().unwrap() };
    let wal = "/var/lib/rpm/rpmdb.sqlite-wal";
    let unfinished = PackagesError::Unfinished { path: wal.parse().unwrap() };
    let table: [(&[(&str, u64)], _); 9] = [
        (&[("/etc/passwd", 1)], Ok(vec![])),
        (&[("/var/lib/dpkg/status", 7)], Ok(vec![(Format::Dpkg, 7)])),
        (
            &[
                ("/var/lib/dpkg/status.d/base", 3),
                ("/var/lib/dpkg/status.d/base.md5sums", 4),
                ("/var/lib/dpkg/status.d/sub/x", 5),
                ("/lib/apk/db/installed", 6),
            ],
            Ok(vec![(Format::Dpkg, 3), (Format::Apk, 6)]),
        ),
        (&[("/var/lib/dpkg/status", 129 << 20)], Err(PackagesError::TooLong { bytes: 129 << 20 })),
        (&many, Err(PackagesError::TooManyFiles)),
        (&[("/var/lib/rpm/Packages.db", 1)], Err(foreign("/var/lib/rpm/Packages.db"))),
        (&[("/var/lib/rpm/rpmdb.sqlite", 1), (wal, 0)], Ok(vec![(Format::Rpm, 1)])),
        (&[("/var/lib/rpm/rpmdb.sqlite", 1), (wal, 1)], Err(unfinished)),
        (&[("/var/lib/rpm/Packages", 1), ("/var/lib/dpkg/status", 7)], Ok(vec![(Format::Dpkg, 7)])),
    ];
    for (paths, want) in table {
        assert_eq!(found(paths), want);
    }
}

#[test]
fn rows_that_lie_upon_each_other_are_not_all_read() {
    const PAGE: usize = 65_536;
    let mut bytes = vec![0; 2 * PAGE];
    bytes[..16].copy_from_slice(b"SQLite format 3\0");
    // Pages of 64 KiB.
    bytes[16..18].copy_from_slice(&1_u16.to_be_bytes());
    // The schema: one row of type, name, table and page.
    let values = b"tablePackagesPackages\x02";
    let kinds = [23, 29, 29, 1];
    let row = [&[values.len() as u8 + 5, 1, 5], &kinds[..], values].concat();
    bytes[100] = 0x0d;
    bytes[103..105].copy_from_slice(&1_u16.to_be_bytes());
    bytes[108..110].copy_from_slice(&1_000_u16.to_be_bytes());
    bytes[1_000..1_000 + row.len()].copy_from_slice(&row);
    // The table: so many rows, which all are the one of 16,000 zeros.
    let overlapping = |rows: u16| {
        let mut bytes = bytes.clone();
        let page = &mut bytes[PAGE..];
        page[0] = 0x0d;
        page[3..5].copy_from_slice(&rows.to_be_bytes());
        for index in 0..usize::from(rows) {
            page[8 + 2 * index..][..2].copy_from_slice(&40_000_u16.to_be_bytes());
        }
        // Its length, its number, the length of the kinds, and the kind: a blob.
        page[40_000..40_007].copy_from_slice(&[0xfd, 0x04, 1, 4, 0x81, 0xfa, 0x0c]);
        packages([(&DatabaseFile::of_rpm(&bytes), bytes.as_slice())])
    };
    assert_eq!(overlapping(3), Ok(Vec::new()));
    let why = "invalid SQLite database: its rows are longer than the file".to_owned();
    assert_eq!(overlapping(10_000), Err(PackagesError::Damaged { why }));
}
