//! Reads again what was found to matter.
//!
//! One test, because it measures the memory of the whole process.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use fuzz::TARGETS;
use fuzz::wire::METHODS;

#[test]
fn every_input_is_read_without_harm_and_every_method_has_decoders() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in TARGETS {
        let mut inputs: Vec<_> = fs::read_dir(corpora.join(target.name))
            .unwrap_or_else(|error| panic!("fuzz/corpus/{}: {error}", target.name))
            .map(|entry| entry.unwrap().path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "fuzz/corpus/{} has no inputs", target.name);
        for input in inputs {
            let bytes = fs::read(&input).unwrap();
            assert!(bytes.len() <= target.bytes_max, "{} is too long", input.display());
            eprintln!("{} < {}", target.name, input.display());
            target.run(&bytes);
        }
    }
    let folders = fs::read_dir(corpora).unwrap().map(|entry| entry.unwrap().file_name());
    let folders: BTreeSet<String> = folders.map(|name| name.into_string().unwrap()).collect();
    let names: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(folders, names);

    let served = api::methods().into_iter().filter(|method| !method.reserved);
    let served: BTreeSet<&str> = served.map(|method| method.name).collect();
    let known: BTreeSet<&str> = METHODS.iter().map(|(name, _)| *name).collect();
    assert_eq!(known, served);
}
