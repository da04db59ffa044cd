//! The first inputs of the fuzzer, from the golden files.

use std::fs;
use std::io;
use std::path::Path;

use crate::wire::METHODS;

/// Writes the inputs, into a folder for each target in `into`.
///
/// # Errors
///
/// If a golden file cannot be read, or an input cannot be written.
pub fn write(into: &Path) -> io::Result<()> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../common/rpc/tests/it/golden");
    for entry in fs::read_dir(golden)? {
        let path = entry?.path();
        let text = fs::read_to_string(&path)?;
        let seeds = match path.file_stem().and_then(|stem| stem.to_str()) {
            Some("trees") => trees(&text),
            Some("object_stream") => streams(&text),
            Some("faults") => Vec::new(),
            _ => methods(&text),
        };
        for (index, (target, bytes)) in seeds.iter().enumerate() {
            let folder = into.join(target);
            fs::create_dir_all(&folder)?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            fs::write(folder.join(format!("golden-{stem}-{index:03}")), bytes)?;
        }
    }
    Ok(())
}

type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Returns the sections of a golden file, which each start with `== ` and a title.
fn sections(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("== ").skip(1).map(|section| section.split_once('\n').unwrap_or((section, "")))
}

/// Returns the bytes of lines of hexadecimal digits.
fn unhex<'text>(lines: impl IntoIterator<Item = &'text str>) -> Vec<u8> {
    let digits: Vec<u32> =
        lines.into_iter().flat_map(str::chars).filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks_exact(2).filter_map(|two| u8::try_from(two[0] * 16 + two[1]).ok()).collect()
}

fn methods(text: &str) -> Seeds {
    let mut seeds = Seeds::new();
    for (name, section) in sections(text) {
        let method = METHODS.iter().position(|(known, _)| *known == name);
        let Some(method) = method.and_then(|method| u8::try_from(method).ok()) else { continue };
        for part in ["request", "reply"] {
            let reply = u8::from(part == "reply");
            let Some((_, rest)) = section.split_once(&format!("{part}, bincode:\n")) else {
                continue;
            };
            let Some((binary, rest)) = rest.split_once(&format!("{part}, JSON:\n  ")) else {
                continue;
            };
            let json = rest.lines().next().unwrap_or_default();
            let binary = unhex(binary.lines());
            if name == "ImageServer.GetImage" && part == "reply" {
                seeds.push(("image", [&[0], &binary[..]].concat()));
                seeds.push(("image", [&[1], json.as_bytes()].concat()));
            }
            seeds.push(("methods", [&[method, reply][..], &binary].concat()));
            seeds.push(("methods", [&[method, reply | 2][..], json.as_bytes()].concat()));
        }
    }
    seeds
}

fn trees(text: &str) -> Seeds {
    let mut seeds = Seeds::new();
    for (name, section) in sections(text) {
        let (lines, directories) = section.split_once("\n/ ").unwrap_or((section, ""));
        seeds.push(("tree-text", lines.as_bytes().to_vec()));
        let mut bytes = vec![u8::from(name.starts_with("sha512"))];
        for line in directories.lines().chain(["end:"]) {
            if line.starts_with("  ") {
                bytes.extend(unhex([line]));
            } else if bytes.len() > 1 {
                seeds.push(("directory", bytes.clone()));
                bytes.truncate(1);
            }
        }
    }
    seeds
}

fn streams(text: &str) -> Seeds {
    let mut seeds = Seeds::new();
    for (name, section) in sections(text) {
        let frame = unhex(section.lines());
        let content: &[u8] = if name.ends_with(" object") { b"content" } else { b"" };
        let end: &[u8] = if name == "end" { b"" } else { &[3] };
        seeds.push(("stream", [&[4], &frame[..], content, end].concat()));
    }
    seeds
}
