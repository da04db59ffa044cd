//! The program that libFuzzer drives. `FUZZ_TARGET` names the target. With `FUZZ_SEEDS` it only
//! writes the seeds of all targets into that directory.

#![no_main]

use std::sync::LazyLock;

use fuzz::Target;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    fuzz::target(&name).unwrap_or_else(|| {
        let names: Vec<&str> = fuzz::TARGETS.iter().map(|target| target.name).collect();
        panic!("FUZZ_TARGET must be one of {}", names.join(", "))
    })
});

libfuzzer_sys::fuzz_target!(
    init: {
        if let Some(into) = std::env::var_os("FUZZ_SEEDS") {
            fuzz::seeds::write(into.as_ref()).expect("the seeds can be written");
            std::process::exit(0);
        }
    },
    |bytes: &[u8]| TARGET.run(bytes)
);
