//! What makes a contender's figures worthless: a machine, or a load generator, that was too busy.

/// Rounds of one contender that differ by more than this share of their median were not run under equal conditions.
const MAX_SPREAD: f64 = 0.15;
/// More cores than this share of all, busy with something else, leave too little for a fair measurement.
const MAX_OTHERS: f64 = 0.10;
/// A load generator that is busy for more of the time than this may be what was measured.
const MAX_LOAD_BUSY: f64 = 0.95;

/// Rounds that differ by `spread`, and programs that have nothing to do with it and took the share `others` of all
/// cores, or a load generator `busy` for so much of the time.
pub(crate) fn noise(label: &str, spread: f64, others: f64, busy: f64) -> Vec<String> {
    let mut noise = Vec::new();
    if spread > MAX_SPREAD || others > MAX_OTHERS {
        noise.push(format!(
            "{label}: THE MACHINE WAS DISTURBED: the rounds differ by {:.0} % (fair: {:.0} %), other programs took \
             {:.0} % of all cores (fair: {:.0} %); run it again.",
            spread * 100.0,
            MAX_SPREAD * 100.0,
            others * 100.0,
            MAX_OTHERS * 100.0
        ));
    }
    if busy > MAX_LOAD_BUSY {
        noise.push(format!(
            "{label}: the load generator was busy for {:.0} % of the time and may be what was measured; try more \
             --load-threads.",
            busy * 100.0
        ));
    }
    noise
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_a_reason_by_itself() {
        assert_eq!(noise("a", 0.15, 0.1, 0.95), Vec::<String>::new());
        assert!(noise("a", 0.16, 0.0, 0.0)[0].starts_with("a: THE MACHINE WAS DISTURBED: the rounds differ by 16 %"));
        assert!(noise("a", 0.0, 0.15, 0.0)[0].contains("other programs took 15 % of all cores"));
        assert!(noise("a", 0.0, 0.0, 0.96)[0].contains("the load generator was busy for 96 %"));
    }
}
