//! Splits files into pieces, and groups pieces into requests.
// tidy: core

use api::subd::{PIECE_BYTES_MAX, PIECES_MAX, Piece};
use model::path::TreePath;

/// The most content that one request asks for, in bytes.
const REQUEST_BYTES_MAX: u64 = 8 << 20;

/// Splits files, one after the other. An empty file is one empty piece.
#[derive(Clone, Debug)]
pub struct FilePieces {
    files: Vec<(TreePath, u64)>,
    /// The index of the file of the next piece, and the offset in it, in bytes.
    at: (usize, u64),
}

impl FilePieces {
    /// `files` are given with the length of each in bytes.
    pub fn new(files: Vec<(TreePath, u64)>) -> Self {
        Self { files, at: (0, 0) }
    }

    /// Returns the pieces to request next, each with the index of its file; none at the end.
    pub fn ask(&self) -> Vec<(usize, Piece)> {
        let mut pieces = Vec::new();
        let mut bytes = 0;
        let mut at = self.at;
        while let Some((path, size_bytes)) = self.files.get(at.0) {
            let length = self.length(at);
            if pieces.len() == PIECES_MAX || bytes + u64::from(length) > REQUEST_BYTES_MAX {
                break;
            }
            bytes += u64::from(length);
            pieces.push((at.0, Piece { path: path.clone(), offset: at.1, length }));
            at = after(at, length, *size_bytes);
        }
        pieces
    }

    /// Continues after the first `count` pieces of [`FilePieces::ask`].
    pub fn taken(&mut self, count: usize) {
        for _ in 0..count {
            let Some((_, size_bytes)) = self.files.get(self.at.0) else { return };
            self.at = after(self.at, self.length(self.at), *size_bytes);
        }
    }

    fn length(&self, (file, offset): (usize, u64)) -> u32 {
        let rest = self.files[file].1 - offset;
        u32::try_from(rest).map_or(PIECE_BYTES_MAX, |rest| rest.min(PIECE_BYTES_MAX))
    }
}

fn after((file, offset): (usize, u64), length: u32, size_bytes: u64) -> (usize, u64) {
    let offset = offset + u64::from(length);
    if offset >= size_bytes { (file + 1, 0) } else { (file, offset) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = PIECE_BYTES_MAX as u64;

    fn all(files: &[u64], answered: usize) -> Vec<Vec<(usize, u64, u32)>> {
        let path = |index: usize| format!("/{index}").parse().unwrap();
        let files = files.iter().enumerate().map(|(index, length)| (path(index), *length));
        let mut pieces_to_ask = FilePieces::new(files.collect());
        let mut all = Vec::new();
        loop {
            let pieces = pieces_to_ask.ask();
            if pieces.is_empty() {
                return all;
            }
            pieces_to_ask.taken(pieces.len().min(answered));
            let pieces = pieces.into_iter().take(answered);
            all.push(pieces.map(|(file, piece)| (file, piece.offset, piece.length)).collect());
        }
    }

    #[test]
    fn files_are_cut_and_small_ones_share_a_request() {
        assert_eq!(all(&[], 9), Vec::<Vec<_>>::new());
        let one = [(0, 0, 0), (1, 0, 5), (2, 0, PIECE_BYTES_MAX), (2, PIECE, 1), (3, 0, 0)];
        assert_eq!(all(&[0, 5, PIECE + 1, 0], 9), [one]);
        // A machine that answers less is asked again for the rest.
        let rest = [one[..2].to_vec(), one[2..4].to_vec(), one[4..].to_vec()];
        assert_eq!(all(&[0, 5, PIECE + 1, 0], 2), rest);
        let large: Vec<usize> = all(&[20 * PIECE], 99).iter().map(Vec::len).collect();
        assert_eq!(large, [8, 8, 4]);
        let many: Vec<usize> = all(&vec![1; 600], 999).iter().map(Vec::len).collect();
        assert_eq!(many, [256, 256, 88]);
    }
}
