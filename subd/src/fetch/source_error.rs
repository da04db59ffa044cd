//! What may go wrong with a source, and whether it is asked again.
// tidy: core

use std::time::Duration;

use api::subd::FetchFailure;

/// How often a source is asked again without anything having come of it.
const RETRIES_MAX: u32 = 4;

/// The first pause before a source is asked again; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Why a source did not give what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceError {
    /// The parts of an object that several sources gave do not fit together; it is to be asked for
    /// as a whole.
    Unfit(String),
    /// There is no way to it.
    Unreachable(String),
    /// It gave a part: the connection broke, or nothing came any more, or it is too busy.
    Cut(String),
    /// It will not, however often it is asked.
    Refused(String),
    /// It sent what it was not asked for, or other content than the object has.
    Lie(String),
    /// The source is not to blame: the fetch is over.
    Local(FetchFailure),
}

/// What to do after trouble with a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask it again after this pause.
    Again(Duration),
    /// Ask the next one.
    Switch,
}

impl SourceError {
    fn weight(&self) -> u8 {
        match self {
            Self::Unfit(_) => 0,
            Self::Unreachable(_) => 1,
            Self::Cut(_) => 2,
            Self::Refused(_) => 3,
            Self::Lie(_) => 4,
            Self::Local(_) => 5,
        }
    }

    /// What is to be said of it.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Unfit(text)
            | Self::Unreachable(text)
            | Self::Cut(text)
            | Self::Refused(text)
            | Self::Lie(text) => text.clone(),
            Self::Local(failure) => format!("{failure:?}"),
        }
    }

    /// The worse of the two; of equals the first.
    #[must_use]
    pub fn or_worse(self, other: Self) -> Self {
        if other.weight() > self.weight() { other } else { self }
    }
}

/// Counts how often a source was asked in vain.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    vain: u32,
}

impl Patience {
    /// Says what to do after `trouble`; `progress`: something came before it; `others`: there is
    /// a source that was not asked yet.
    pub fn after(&mut self, trouble: &SourceError, progress: bool, others: bool) -> Next {
        self.vain = if progress { 0 } else { self.vain + 1 };
        match trouble {
            SourceError::Refused(_) | SourceError::Lie(_) | SourceError::Local(_) => Next::Switch,
            // A machine that is down is not waited for while another may be up.
            SourceError::Unreachable(_) if others => Next::Switch,
            _ if self.vain > RETRIES_MAX => Next::Switch,
            SourceError::Unfit(_) => Next::Again(Duration::ZERO),
            SourceError::Unreachable(_) | SourceError::Cut(_) => {
                Next::Again(PAUSE_MIN * 2_u32.pow(self.vain.saturating_sub(1)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_asked_again_for_a_while_and_as_long_as_something_comes() {
        let text = String::new;
        let again = |ms| Next::Again(Duration::from_millis(ms));
        #[rustfmt::skip]
        let table = [
            (SourceError::Cut(text()),         true,  vec![(false, again(200)), (false, again(400)),
                (true, again(200)), (false, again(200)), (false, again(400)), (false, again(800)),
                (false, again(1_600)), (false, Next::Switch)]),
            (SourceError::Unreachable(text()), false, vec![(false, again(200)), (false, again(400)),
                (false, again(800)), (false, again(1_600)), (false, Next::Switch)]),
            (SourceError::Unreachable(text()), true,  vec![(false, Next::Switch)]),
            (SourceError::Unfit(text()),       true,  vec![(false, again(0)), (true, again(0))]),
            (SourceError::Refused(text()),     false, vec![(true, Next::Switch)]),
            (SourceError::Lie(text()),         false, vec![(true, Next::Switch)]),
        ];
        for (trouble, others, steps) in table {
            let mut patience = Patience::default();
            for (progress, expected) in steps {
                assert_eq!(patience.after(&trouble, progress, others), expected, "{trouble:?}");
            }
        }
    }

    #[test]
    fn the_worst_of_several_troubles_counts() {
        let (cut, lie) = (SourceError::Cut("a".to_owned()), SourceError::Lie("b".to_owned()));
        assert_eq!(cut.clone().or_worse(lie.clone()), lie);
        assert_eq!(lie.clone().or_worse(cut.clone()), lie);
        assert_eq!(cut.clone().or_worse(SourceError::Cut("c".to_owned())), cut);
    }
}
