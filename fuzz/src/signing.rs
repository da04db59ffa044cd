//! Who stands behind an image, and the record of who did what.

use api::audit::verify::Verifier;
use model::signing::{Signature, Statement, TrustedKeys};

/// A statement, a zero, and the signature under it.
pub fn signature(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (statement, signature) = text.split_once('\0').unwrap_or((text, ""));
    let read = statement.parse::<Statement>();
    if let Ok(read) = &read {
        assert_eq!(read.to_string(), statement, "two texts of one statement");
    }
    let signature = Signature { statement: statement.to_owned(), signature: signature.to_owned() };
    if let Ok(checked) = signature.check() {
        assert_eq!(Ok(checked.statement), read);
    }
}

/// The file of trusted keys.
pub fn keys(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(keys) = TrustedKeys::read(text, 1) else { return };
    assert!(!keys.is_empty() && keys.len() <= text.lines().count());
    assert_eq!(keys.names().count(), keys.len());
    // The same keys again are named twice.
    assert!(TrustedKeys::read(&format!("{text}\n{text}"), 1).is_err());
}

/// The lines of an audit log.
pub fn audit(bytes: &[u8]) {
    let mut verifier = Verifier::new(Vec::new());
    verifier.file("audit.1");
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        verifier.line(line);
    }
    let report = verifier.finish();
    assert_eq!(report.files, 1);
    // Nobody makes up a hash.
    let told = report.troubles.len() + report.remarks.len();
    assert!(bytes.is_empty() || report.records > 0 || told > 0, "{report:?}");
}
