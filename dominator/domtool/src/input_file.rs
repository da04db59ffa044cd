//! Files that operators ask about.

use std::io::{self, Read};
use std::path::Path;

use tool::PlacedError;

/// Reads a file, or stdin, up to one byte more than it may have.
pub(super) fn read(path: &Path, bytes_max: usize) -> Result<String, PlacedError> {
    let mut text = String::new();
    let limit = bytes_max as u64 + 1;
    let done = if path == Path::new("-") {
        io::stdin().take(limit).read_to_string(&mut text)
    } else {
        fs_err::File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text))
    };
    done.map_err(|error| PlacedError::new(path.display().to_string(), error))?;
    if text.len() > bytes_max {
        let problem = format!("has more than {bytes_max} bytes");
        return Err(PlacedError::new(path.display().to_string(), problem));
    }
    Ok(text)
}
