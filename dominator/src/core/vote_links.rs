//! Links with which voters vote once, without a certificate.
//!
//! A link names a voter and a plan, and has a keyed hash of both (BLAKE3 with a key that only the
//! dominator has). Following it shows the plan; only the form on that page votes.
// tidy: core

use rollouts::document::{Step, StepState, Vote, name_of};
use rollouts::steps::Said;

/// The page of a link.
pub const PAGE: &str = "/vote-link";

/// What a link holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The id of the rollout.
    pub rollout: String,
    pub step: String,
    /// The digest of the plan that the vote is about.
    pub digest: String,
    pub voter: String,
    /// When the link ends, in seconds since 1970.
    pub expires: u64,
    /// The keyed hash of all that, in hexadecimal.
    pub proof: String,
}

/// Makes and checks links.
pub struct VoteLinks {
    /// The address of the dominator's pages, without a slash at the end; `None` if it is not known.
    address: Option<String>,
    key: [u8; 32],
}

impl std::fmt::Debug for VoteLinks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("VoteLinks").field("address", &self.address).finish_non_exhaustive()
    }
}

impl VoteLinks {
    #[must_use]
    pub fn new(address: Option<&str>, key: [u8; 32]) -> Self {
        Self { address: address.map(|text| text.trim_end_matches('/').to_owned()), key }
    }

    /// Returns a link for a voter; `None` if the address of the pages is not known. The proof of
    /// `ticket` is not read.
    #[must_use]
    pub fn link(&self, ticket: Ticket) -> Option<String> {
        let address = self.address.as_ref()?;
        let proof = self.proof(&ticket).to_string();
        Some(format!("{address}{}", path_of(&Ticket { proof, ..ticket })))
    }

    /// Checks that a link was made here, has not expired at `now`, in seconds since 1970, and was
    /// not used. `step` is as it is now.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 403 or 410.
    pub fn check(&self, ticket: &Ticket, step: Option<&Step>, now: u64) -> Result<(), Said> {
        let proof = blake3::Hash::from_hex(&ticket.proof);
        // Equality of hashes takes the same time for all.
        if proof.ok() != Some(self.proof(ticket)) {
            return Err(Said::new(403, "the link is not one of this dominator"));
        }
        if now >= ticket.expires {
            return Err(Said::new(410, "the link has expired; `domtool approve` needs none"));
        }
        let vote = step.and_then(|step| step.vote_of(&ticket.voter, &ticket.digest));
        if let Some(Vote { voter, vote, .. }) = vote {
            let text = format!(
                "{voter} has voted: {}. A link is for one vote; domtool changes it",
                name_of(vote)
            );
            return Err(Said::new(410, text));
        }
        let waits = |step: &Step| {
            step.state == StepState::AwaitingApproval
                && step.digest.as_ref() == Some(&ticket.digest)
        };
        match step {
            Some(step) if waits(step) => Ok(()),
            _ => Err(Said::new(
                410,
                "the step is decided, or has another plan than that of the link",
            )),
        }
    }

    fn proof(&self, ticket: &Ticket) -> blake3::Hash {
        let Ticket { rollout, step, digest, voter, expires, proof: _ } = ticket;
        let text = serde_json::json!([rollout, step, digest, voter, expires]).to_string();
        blake3::keyed_hash(&self.key, text.as_bytes())
    }
}

/// Returns the path and query of the page of a link.
#[must_use]
pub fn path_of(ticket: &Ticket) -> String {
    let Ticket { rollout, step, digest, voter, expires, proof } = ticket;
    let query = form_urlencoded::Serializer::new(String::new())
        .append_pair("rollout", rollout)
        .append_pair("step", step)
        .append_pair("digest", digest)
        .append_pair("voter", voter)
        .append_pair("expires", &expires.to_string())
        .append_pair("proof", proof)
        .finish();
    format!("{PAGE}?{query}")
}

#[cfg(test)]
mod tests {
    use rollouts::document::Choice;

    use super::*;

    fn ticket() -> Ticket {
        let [rollout, step, digest, voter] = ["r12", "web", "8d1f", "bob & co"].map(str::to_owned);
        Ticket { rollout, step, digest, voter, expires: 1_000, proof: String::new() }
    }

    #[test]
    fn a_link_is_good_for_one_vote_about_one_plan() {
        let links = VoteLinks::new(Some("https://dominator.example:6970/"), [7; 32]);
        let link = links.link(ticket()).unwrap();
        let (address, query) = link.split_once('?').unwrap();
        assert_eq!(address, "https://dominator.example:6970/vote-link");
        let fields: Vec<String> =
            form_urlencoded::parse(query.as_bytes()).map(|(_, value)| value.into_owned()).collect();
        let good = Ticket { proof: fields[5].clone(), ..ticket() };
        assert_eq!(fields[..5], ["r12", "web", "8d1f", "bob & co", "1000"]);
        assert_eq!(VoteLinks::new(None, [7; 32]).link(ticket()), None);

        let waits = Step {
            state: StepState::AwaitingApproval,
            digest: Some("8d1f".to_owned()),
            ..Step::default()
        };
        let vote = |voter: &str, digest: &str| Vote {
            voter: voter.to_owned(),
            vote: Choice::Approve,
            digest: digest.to_owned(),
        };
        let with = |vote| Step { votes: vec![vote], ..waits.clone() };
        let said = |ticket: &Ticket, step: Option<&Step>, now| match links.check(ticket, step, now)
        {
            Ok(()) => "good\n".to_owned(),
            Err(said) => format!("{} {}\n", said.code, said.message),
        };
        let other = VoteLinks::new(None, [8; 32]);
        let lines = [
            said(&good, Some(&waits), 999),
            said(&good, Some(&waits), 1_000),
            said(&Ticket { expires: 2_000, ..good.clone() }, Some(&waits), 999),
            said(&Ticket { voter: "eve".to_owned(), ..good.clone() }, Some(&waits), 999),
            said(&Ticket { proof: "8d".to_owned(), ..good.clone() }, Some(&waits), 999),
            said(
                &Ticket { proof: other.proof(&good).to_string(), ..good.clone() },
                Some(&waits),
                9,
            ),
            said(&good, Some(&with(vote("bob & co", "8d1f"))), 999),
            said(&good, Some(&with(vote("bob & co", "0000"))), 999),
            said(&good, Some(&with(vote("eve", "8d1f"))), 999),
            said(&good, Some(&Step { digest: None, ..waits.clone() }), 999),
            said(&good, Some(&Step { state: StepState::Applying, ..waits.clone() }), 999),
            said(&good, None, 999),
        ];
        expect_test::expect![[r#"
            good
            410 the link has expired; `domtool approve` needs none
            403 the link is not one of this dominator
            403 the link is not one of this dominator
            403 the link is not one of this dominator
            403 the link is not one of this dominator
            410 bob & co has voted: approve. A link is for one vote; domtool changes it
            good
            good
            410 the step is decided, or has another plan than that of the link
            410 the step is decided, or has another plan than that of the link
            410 the step is decided, or has another plan than that of the link
        "#]]
        .assert_eq(&lines.concat());
    }
}
